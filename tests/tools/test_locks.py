"""The locks agree with the lists, and a file that is not the locked one is refused.

Every package has hashes, so that another file of the same name is not installed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path

import pytest
from containers import ROOT, copy_checkout

LOCK_TEXTS = {
    path.stem: path.read_text()
    for path in sorted((ROOT / "locks").glob("*.txt"))
    # image-cpu, conda-3.11, ...: locked by a person, for a variant of the image.
    if path.stem != "never" and not path.stem.startswith(("image-", "conda-"))
}
STANZA_PATTERN = re.compile(
    r"^([a-z0-9.-]+)==(\S+)(?: ; ([^\\\n]+))? \\\n((?:^    .*\n)+)", re.MULTILINE
)
PIN = r"([\w.-]+)(?:\[.*\])?==(\S+)"


def locked(name: str) -> dict[str, set[str]]:
    """Return the versions of each package of a lock.

    Some packages have one version for each range of Pythons.
    """
    versions = {}
    for package, version, _, _ in STANZA_PATTERN.findall(LOCK_TEXTS[name]):
        versions.setdefault(package, set()).add(version)
    return versions


def pins(file: str, prefix: str = "^") -> dict[str, str]:
    """Return the packages that a list asks for, each with its version."""
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in re.findall(prefix + PIN, (ROOT / file).read_text(), re.MULTILINE)
    }


CONDA_PINS = pins("environment.yml", "^ +- ")
TEST_PINS = CONDA_PINS | pins("tests/requirements.txt")
LISTS = {
    "image": CONDA_PINS,
    "tests": TEST_PINS,
    "toolkit": {"sagemaker-training": CONDA_PINS["sagemaker-training"]},
    "build": {"setuptools": max(locked("image")["setuptools"])},
    "bolts": pins("environment.yml", r"^# .*: (?=lightning-bolts)"),
    "mlflow": pins("environment.yml", r"(?:: |and )(?=mlflow-skinny|sagemaker-mlflow)"),
    "wandb": pins("environment.yml", ", (?=wandb)"),
    "tools": pins("scripts/tools.txt"),
    "uv": {"uv": pins("scripts/tools.txt")["uv"]},
} | {
    path.stem: pins(f"tests/environments/{path.name}")
    for path in (ROOT / "tests/environments").glob("*.txt")
}


def wanted(name: str) -> set[str]:
    """Return the packages of a lock that no other package asked for.

    uv names in a comment who asked for a package.
    """
    return {
        package
        for package, _, _, hash_lines in STANZA_PATTERN.findall(LOCK_TEXTS[name])
        if "# via" not in hash_lines or re.search(r"#(?: +via)? +-r ", hash_lines)
    }


def test_every_list_has_a_lock():
    assert LOCK_TEXTS.keys() == LISTS.keys()
    assert "torch" in CONDA_PINS and {"torch", "pytest"} <= TEST_PINS.keys()


@pytest.mark.parametrize("name", LISTS)
def test_lock_and_list_agree(name):
    """If they do not agree, run `make lock`."""
    versions = locked(name)
    assert {package: versions.get(package) for package in LISTS[name]} == {
        package: {version} for package, version in LISTS[name].items()
    }
    assert wanted(name) <= LISTS[name].keys()


@pytest.mark.parametrize("name", LISTS)
def test_every_package_has_hashes_and_no_place(name):
    """Each line has a package, its hashes, or what needs it; no line names an index."""
    text = LOCK_TEXTS[name]
    named = re.findall(r"^[^\s#].*$", text, re.MULTILINE)
    stanzas = STANZA_PATTERN.findall(text)
    assert len(named) == len(stanzas) and len(stanzas) >= len(LISTS[name])
    for package, _, _, hash_lines in stanzas:
        hashes = [line for line in hash_lines.splitlines() if not line.lstrip().startswith("#")]
        assert hashes and all(
            re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes
        ), package
    assert "://" not in text


def test_the_tests_have_what_the_image_has():
    tests = locked("tests")
    assert {package: tests.get(package) for package in locked("image")} == locked("image")


@pytest.mark.parametrize("name", LISTS)
def test_no_malicious_release_is_locked(name):
    never = (ROOT / "locks/never.txt").read_text()
    assert {"2.6.2", "2.6.3"} == set(
        re.findall(r"!=([\d.]+)", re.search("^lightning!=.*", never, re.MULTILINE)[0])
    )
    assert not {"2.6.2", "2.6.3"} & locked(name).get("lightning", set())


def test_this_environment_is_what_is_locked():
    """`make env` made this environment; packages that `make compat` replaces do not count."""
    installed = {
        re.sub(r"[-_.]+", "-", package.name).lower(): package.version for package in distributions()
    }
    expected = locked("tests") | locked("bolts")
    if "sagemaker-lightning" in installed or Path(sys.prefix).name.startswith("lightning-"):
        pytest.skip("an environment of another kind")
    assert {
        name for name, version in installed.items() if version not in expected.get(name, ())
    } == set()


# A local index ------------------------------------------------------------------------------------


def write_wheel(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{about}/RECORD",
            f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
        )
    return wheel


def install(tmp_path: Path, lock: str, index: Path) -> subprocess.CompletedProcess:
    """Install a lock from a local index into tmp_path/site."""
    (tmp_path / "lock.txt").write_text(lock)
    script = ROOT / "scripts/install_locked.sh"
    local = [
        "--no-index",
        "--find-links",
        index,
        "--cache-dir",
        tmp_path / "cache",
        "--target",
        tmp_path / "site",
    ]
    command = [script, sys.executable, "install", *local, tmp_path / "lock.txt"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_wheel_that_is_not_the_locked_one_is_not_installed(tmp_path):
    """An index serves another file for `six`, and the lock's own entry refuses it.

    A lock entry with the hash of that very file takes it.
    """
    version = max(locked("image")["six"])
    wheel = write_wheel(tmp_path / "index", "six", version)
    (stanza,) = (
        match[0] for match in STANZA_PATTERN.finditer(LOCK_TEXTS["image"]) if match[1] == "six"
    )
    refused = install(tmp_path, stanza, tmp_path / "index")
    assert refused.returncode == 1 and not (tmp_path / "site/six.py").exists()
    assert "Hash mismatch for `six==" in refused.stderr
    assert (
        "the index serves another file than the one that was locked, do not install it"
        in refused.stderr
    )
    own_entry = f"six=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    installed = install(tmp_path, own_entry, tmp_path / "index")
    assert installed.returncode == 0 and (tmp_path / "site/six.py").exists(), installed.stderr


def test_a_package_that_no_lock_has_is_not_installed(tmp_path):
    write_wheel(tmp_path / "index", "six", "9.9")
    refused = install(tmp_path, "six==9.9\n", tmp_path / "index")
    assert refused.returncode == 1
    assert "six==9.9" in refused.stderr
    assert not (tmp_path / "site/six.py").exists()


def test_a_package_that_the_index_lacks_is_one_line(tmp_path):
    (tmp_path / "index").mkdir()
    refused = install(tmp_path, f"six==1.17.0 --hash=sha256:{'0' * 64}\n", tmp_path / "index")
    last_line = refused.stderr.splitlines()[-1]
    assert refused.returncode == 1
    assert last_line.startswith("error: ")
    assert "lock.txt: the index lacks a" in last_line
    assert "set PIP_INDEX_URL to an index that has it" in last_line


@pytest.mark.root
def test_a_full_disk_is_named_in_the_last_line(tmp_path):
    wheel = write_wheel(tmp_path / "index", "six", "9.9")
    lock = f"six==9.9 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "site").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", tmp_path / "site"], check=True
    )
    try:
        (tmp_path / "site/fills_it").write_bytes(bytes(4096))
        refused = install(tmp_path, lock, tmp_path / "index")
    finally:
        subprocess.run(["umount", tmp_path / "site"], check=True)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith(
        "the disk is full, make room and try again (see above)"
    )


@pytest.mark.slow
def test_another_uv_than_the_locked_one_is_not_installed(tmp_path):
    """uv.sh has pip check it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "locks").mkdir()
    for name in ("uv.sh", "install_locked.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    version = max(locked("uv")["uv"])
    write_wheel(tmp_path / "index", "uv", version)
    for name in ("uv", "build"):
        (tmp_path / f"locks/{name}.txt").write_text(LOCK_TEXTS[name])
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    command = [tmp_path / "scripts/install_locked.sh", sys.executable, "install", "locks/uv.txt"]
    completed = subprocess.run(command, env=os.environ | index, capture_output=True, text=True)
    last_line = completed.stderr.splitlines()[-1]
    assert completed.returncode == 1, completed
    assert last_line.startswith("error: locks/uv.txt: uv, which installs"), completed
    assert completed.stderr.count("error: ") == 1 and not list(tmp_path.glob(".venvs/uv*"))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_lock_serves_other_pythons(tmp_path, version):
    """The lock has a wheel of each package for that Python on Linux. Nothing is installed.

    The toolkit and inotify-simple, which it needs, have no wheel for any.
    """
    lock = re.sub(
        r"^(?:sagemaker-training|inotify-simple)==.*\n(?:    .*\n)+",
        "",
        LOCK_TEXTS["image"],
        flags=re.M,
    )
    (tmp_path / "lock.txt").write_text(lock)
    command = ["scripts/uv.sh", "pip", "install", "--dry-run", "--require-hashes", "--no-deps"]
    command += [
        "--only-binary=:all:",
        f"--python-version={version}",
        f"--target={tmp_path / 'site'}",
    ]
    command += ["--python-platform=x86_64-manylinux_2_28", f"--requirement={tmp_path / 'lock.txt'}"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


FETCHED_FILES = {
    "another file": ("0" * 64, "file", "NAME_SHA256: found {found}, expected 000"),
    "no checksum": ("", "file", "NAME_SHA256: found '', expected the SHA-256 of file://"),
    "no such file": ("0" * 64, "nowhere", "NAME_URL: file:///"),
}


@pytest.mark.parametrize(("digest", "name", "line"), FETCHED_FILES.values(), ids=FETCHED_FILES)
def test_what_a_build_fetches_is_checked(tmp_path, digest, name, line):
    """scripts/fetch.sh keeps no file that is not the one that was meant."""
    (tmp_path / "file").write_text("x")
    actual_digest = hashlib.sha256(b"x").hexdigest()
    variables = {"NAME_URL": f"file://{tmp_path / name}", "NAME_SHA256": digest}
    script = [ROOT / "scripts/fetch.sh", "NAME", tmp_path / "fetched"]
    completed = subprocess.run(script, env=os.environ | variables, capture_output=True, text=True)
    last_line = completed.stderr.splitlines()[-1]
    assert completed.returncode == 1, completed
    assert last_line.startswith(f"error: {line.format(found=actual_digest)}"), completed
    assert not (tmp_path / "fetched").exists()
    variables = {"NAME_URL": f"file://{tmp_path / 'file'}", "NAME_SHA256": actual_digest}
    subprocess.run(script, env=os.environ | variables, check=True)
    assert (tmp_path / "fetched").read_text() == "x"


MISTAKES = {
    "a password": ({"PIP_INDEX_URL": "https://me:x@host/simple"}, "PIP_INDEX_URL: found a user or"),
    "no lock": ({"TORCH": "cu999"}, "TORCH: found 'cu999', but there is no locks/image-cu999.txt"),
}


@pytest.mark.parametrize(("variables", "line"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_build_argument_is_one_line(variables, line):
    """The engine is not asked to build anything."""
    completed = subprocess.run(
        [ROOT / "scripts/build_image.sh"],
        env=os.environ | {"DOCKER": "true"} | variables,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 1 and completed.stderr.startswith(f"error: {line}"), completed
    assert completed.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["lightning==2.6.3", "lightning>=2.6.2"])
def test_a_jobs_own_requirements_bring_no_malicious_release(tmp_path, wish):
    """The image sets PIP_CONSTRAINT."""
    for version in ("2.6.2", "2.6.3"):
        write_wheel(tmp_path / "index", "lightning", version)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--find-links",
        tmp_path / "index",
        "--target",
        tmp_path / "site",
        wish,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    completed = subprocess.run(
        command,
        env=environment | {"PIP_CONSTRAINT": str(ROOT / "locks/never.txt")},
        capture_output=True,
    )
    assert completed.returncode == 1 and not (tmp_path / "site").exists(), completed
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0


# What reads the locks: the audit and the SBOM -----------------------------------------------------


@pytest.fixture
def database():
    """Serve a stand-in for OSV's database.

    Return its address, the names that were looked up, and the set of those with a vulnerability.
    """
    packages_asked = []
    vulnerable = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = query["package"]["name"]
            packages_asked.append(name)
            ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]
            affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}]
            about = {
                "id": "PYSEC-0000-1",
                "details": "x",
                "modified": "2026-01-01T00:00:00Z",
                "affected": affected,
            }
            body = json.dumps({"vulns": [about]} if name in vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query", packages_asked, vulnerable
    server.shutdown()
    thread.join()
    server.server_close()


def make(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_an_audit(database):
    """Every package is looked up.

    The audit fails if a package is vulnerable, and if the database does not answer.
    """
    address, packages_asked, vulnerable = database
    flags = "FLAGS=--vulnerability-service=osv --osv-url="
    completed = make("audit", flags + address)
    assert completed.returncode == 0, completed.stdout[-3000:]
    # Windows only
    assert set(packages_asked) == (locked("image").keys() | locked("bolts").keys()) - {"colorama"}
    vulnerable.add("six")
    completed = make("audit", flags + address)
    assert completed.returncode != 0, completed.stdout[-3000:]
    assert "PYSEC-0000-1" in completed.stdout, completed.stdout[-3000:]
    completed = make(
        "audit", flags + address.replace("/v1", "/nowhere").replace("127.0.0.1", "127.0.0.2")
    )
    assert completed.returncode != 0, completed.stdout[-3000:]
    assert "or the database could not be asked" in completed.stdout, completed.stdout[-3000:]


@pytest.mark.thorough  # of the image: test_container.py
@pytest.mark.slow
def test_the_sbom_of_an_environment(tmp_path):
    """It lists the packages, nearly all with a licence, and a list has a number of its own."""
    assert make(".venvs/tools/locked.txt").returncode == 0
    command = [ROOT / "scripts/make_sbom.sh", tmp_path, sys.executable]
    subprocess.run(command, check=True, env=os.environ | {"TOOLS": str(ROOT / ".venvs/tools")})
    bom = json.loads((tmp_path / "packages.cdx.json").read_text())
    assert uuid.UUID(bom["serialNumber"]).version == 5
    components = bom["components"]
    assert {component["name"].lower() for component in components} == {
        package.name.lower() for package in distributions()
    }
    assert sum("licenses" in component for component in components) > 0.9 * len(components)
    licences = (tmp_path / "licenses.txt").read_text()
    assert "Redistribution and use in source and binary forms" in licences
    assert str(ROOT) not in (tmp_path / "packages.cdx.json").read_text() + licences


@pytest.mark.soak
@pytest.mark.slow
def test_make_lock_changes_nothing_where_lock_and_list_agree(tmp_path):
    """If a list asks for another version of a package, only that package changes."""
    copy_checkout(tmp_path)
    command = [tmp_path / "scripts/make_lock.sh"]
    variables = os.environ | {
        "UV_FOLDER": str(ROOT / ".venvs/uv"),
        "UV_CACHE_DIR": str(ROOT / ".venvs/cache"),
    }
    subprocess.run(command, check=True, env=variables)
    written = {
        path.stem: path.read_text()
        for path in (tmp_path / "locks").glob("*.txt")
        if path.stem != "never"
    }
    assert written == LOCK_TEXTS
    environment = tmp_path / "environment.yml"
    environment.write_text(
        environment.read_text().replace(f"psutil=={CONDA_PINS['psutil']}", "psutil==7.2.1")
    )
    subprocess.run(command, check=True, env=variables)
    lock = (tmp_path / "locks/image.txt").read_text()
    old_packages, new_packages = (
        re.findall(r"^[a-z].*==.*$", text, re.MULTILINE) for text in (LOCK_TEXTS["image"], lock)
    )
    assert set(new_packages) - set(old_packages) == {"psutil==7.2.1 \\"}
