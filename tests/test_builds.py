"""Builds of the image with few packages: layers of the same bytes, variants, and what ends a build.

The Dockerfile is the real one; the locks are cut to what one build takes in seconds.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from containers import DOCKER, ROOT, build, build_variables, copy_checkout, docker
from test_locks import LOCK_TEXTS, STANZA_PATTERN, write_wheel

# tests/test_container.py has the image as it is, tests/test_locks.py the locks.
pytestmark = [pytest.mark.docker, pytest.mark.thorough]

SOURCE_DATE_EPOCH = 315532800  # the Dockerfile's SOURCE_DATE_EPOCH
SITE_PACKAGES = "/opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages"


def stanzas(lock: str, *packages: str) -> str:
    """Return a lock that has these packages of another."""
    found = {match[1]: match[0] for match in STANZA_PATTERN.finditer(lock)}
    return "".join(found[package] for package in packages)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout with few packages, and an SBOM of nothing."""
    copy_checkout(tmp_path / "source")
    few = stanzas(LOCK_TEXTS["image"], "pip", "sagemaker-training", "six", "typing-extensions")
    (tmp_path / "source/locks/image.txt").write_text(few)
    (tmp_path / "source/locks/tools.txt").write_text(stanzas(LOCK_TEXTS["image"], "packaging"))
    (tmp_path / "source/scripts/make_sbom.sh").write_text('#!/bin/bash\nmkdir -p "$1"\n')
    return tmp_path / "source"


@pytest.fixture
def tags() -> Iterator[list[str]]:
    """Two names of images, removed after the test."""
    names = [f"sagemaker-lightning-test:{uuid.uuid4().hex[:12]}" for _ in range(2)]
    yield names
    for name in names:
        docker("image", "rm", "--force", name)


@pytest.fixture
def served_folder(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder where builds reach it; yield its address and the folder."""
    gateway = docker("network", "inspect", "bridge", "--format={{(index .IPAM.Config 0).Gateway}}")
    (tmp_path / "served").mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(
        (gateway.stdout.strip(), 0), partial(Handler, directory=tmp_path / "served")
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{server.server_address[0]}:{server.server_port}", tmp_path / "served"
    server.shutdown()
    thread.join()
    server.server_close()


def output_in_image(tag: str, *command: str) -> str:
    done = docker("run", "--rm", "--entrypoint=", tag, *command)
    assert done.returncode == 0, done.stdout
    return done.stdout


def layers(tag: str) -> list[str]:
    return json.loads(docker("image", "inspect", "--format={{json .RootFS.Layers}}", tag).stdout)


def layer_contents(tag: str, number: int) -> dict[str, tuple]:
    """Return what is in an image's layer: each name with its type, mode, size, date and digest."""
    with subprocess.Popen([DOCKER, "save", tag], stdout=subprocess.PIPE) as saved:
        image = io.BytesIO(saved.stdout.read())
    with tarfile.open(fileobj=image) as archive:
        name = json.load(archive.extractfile("manifest.json"))[0]["Layers"][number]
        with tarfile.open(fileobj=archive.extractfile(name)) as layer:
            return {
                one.name: (
                    one.type,
                    one.mode,
                    one.size,
                    one.mtime,
                    hashlib.sha256(layer.extractfile(one).read()).hexdigest()
                    if one.isreg()
                    else one.linkname,
                )
                for one in layer
            }


def differences(first: str, second: str) -> list[str]:
    """Return what differs between the layers of two images."""
    lines = []
    for number, (one, other) in enumerate(zip(layers(first), layers(second), strict=True)):
        if one != other:
            ones, others = layer_contents(first, number), layer_contents(second, number)
            lines += [
                f"layer {number}: {name}: {ones.get(name)}, {others.get(name)}"
                for name in sorted(ones.keys() | others.keys())
                if ones.get(name) != others.get(name)
            ]
    return lines


def rebuilt_instructions(first: str, second: str) -> list[str]:
    """Return the instructions of an image that were not taken from another's cache."""
    format_ = "--format={{.CreatedAt}}\t{{.CreatedBy}}"
    lines = [
        docker("history", "--no-trunc", format_, tag).stdout.splitlines() for tag in (first, second)
    ]
    return [one.partition("\t")[2] for one in lines[1] if one not in lines[0]]


def test_two_builds_have_layers_of_the_same_bytes(source: Path, tags, tmp_path):
    """Of two checkouts, whose files have other times and modes; only the system comes from a cache.

    conda's address is part of the cache's key, and of nothing in the image.
    """
    done = build(tags[0], source, **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    other = shutil.copytree(source, tmp_path / "other", copy_function=shutil.copy)
    for path in other.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    mirror = {"CONDA_CHANNEL_ALIAS": "https://conda.example"}
    done = build(tags[1], other, **build_variables() | mirror)
    assert done.returncode == 0, done.stdout[-3000:]
    again = "\n".join(rebuilt_instructions(*tags))
    for part in ("make_conda_environment.sh", "install_locked.sh", "install_bolts.sh", "/runtime"):
        assert part in again, again
    assert layers(tags[0]) == layers(tags[1]), differences(*tags)[:20]


@pytest.mark.soak
def test_the_whole_image_built_again_has_layers_of_the_same_bytes(image: str, tags):
    """Nothing comes from a cache, and only the layers that apt writes may differ."""
    done = build(tags[0], ROOT, "--no-cache", **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    done = build(tags[1], ROOT, "--target=system", **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    system = len(layers(tags[1]))
    assert layers(image)[system:] == layers(tags[0])[system:]
    assert len(layers(image)) > system + 8


def test_byte_code_is_for_the_sources_as_they_are(source: Path, tags):
    """It has the date of its source, as Python expects it, so that Python loads it.

    A source that is changed later is compiled again.
    """
    done = build(tags[0], source, **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    code = f"""
        import pathlib, struct, sys
        site = pathlib.Path("{SITE_PACKAGES}")
        headers = [path.read_bytes()[:12] for path in site.rglob("*.pyc")]
        print(len(headers), {{struct.unpack("<4sII", header)[1:] for header in headers}})
        (site / "six.py").write_text("changed = True")
        import six
        print(six.changed, six.__cached__)
    """
    lines = output_in_image(
        tags[0], "python", "-c", re.sub("^        ", "", code, flags=re.M)
    ).splitlines()
    count, _, headers = lines[0].partition(" ")
    assert int(count) > 300 and headers == f"{{(0, {SOURCE_DATE_EPOCH})}}"
    assert lines[1].startswith("True ")


# Variants -----------------------------------------------------------------------------------------


@pytest.fixture
def cpu(source: Path, served_folder) -> tuple[Path, dict[str, str]]:
    """A list with torch, locked for the stand-ins of its CPU build; and the variables of a build.

    psutil comes from the package index.
    """
    address, folder = served_folder
    text = (source / "environment.yml").read_text()
    kept = re.sub(r"^ +- (?!torch==|torchvision==|psutil)\S+==.*\n", "", text, flags=re.M)
    (source / "environment.yml").write_text(kept)
    for package in ("torch", "torchvision"):
        version = re.search(rf" {package}==(\S+)", text)[1]
        (folder / "cpu" / package).mkdir(parents=True)
        wheel = write_wheel(folder / "cpu" / package, package, f"{version}+cpu")
        (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    shutil.copy(ROOT / "locks/image.txt", source / "locks/image.txt")
    variables = {"TORCH": "cpu", "TORCH_INDEX_URL": f"{address}/cpu"}
    done = make(source, "lock", **variables)
    assert done.returncode == 0, done.stdout
    return source, build_variables() | variables


def make(source: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    given = {"UV_FOLDER": str(ROOT / ".venvs/uv"), "DOCKER": DOCKER} | variables
    words = ("make", *words, *(f"{name}={value}" for name, value in given.items()))
    return subprocess.run(
        words, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_cpu_build_of_torch(cpu, tags):
    """`make lock TORCH=cpu` and `make build TORCH=cpu`, from a stand-in of PyTorch's index."""
    source, variables = cpu
    lock = (source / "locks/image-cpu.txt").read_text()
    assert "#    make lock TORCH=cpu\n" in lock
    assert re.search(r"^torch==[\d.]+\+cpu \\\n    --hash=sha256:[0-9a-f]{64}$", lock, re.M)
    assert stanzas(lock, "psutil").split() >= stanzas(LOCK_TEXTS["image"], "psutil").split()[:2]
    done = build(tags[0], source, **variables)
    assert done.returncode == 0, done.stdout[-3000:]
    listed = output_in_image(tags[0], "ls", SITE_PACKAGES, "/opt/conda/envs/sagemaker-lightning")
    for package in ("torch", "torchvision"):
        assert re.search(rf"^{package}-[\d.]+\+cpu.dist-info$", listed, re.M)
    assert "psutil" in listed and "nvidia" not in listed and "cuda-compat" not in listed


def torchvision_for_cpu(wheel: Path, target: Path) -> None:
    """Write a stand-in of torchvision's CPU build: without its kernels, which are for CUDA.

    Models, transforms and data sets need none of them; importing it needs two to be declared.
    """
    declared = (
        'for _n in ("nms", "qnms"):\n    torch.library.define("torchvision::" + _n, '
        '"(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
    )
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        names = [name for name in old.namelist() if not name.endswith((".so", "/RECORD"))]
        for name in names:
            data = old.read(name).decode() if name.endswith((".py", "METADATA")) else old.read(name)
            if name.endswith("_meta_registrations.py"):
                data = data.replace("import torch\n", f"import torch\n{declared}", 1)
            elif name.endswith("METADATA"):
                data = data.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
            new.writestr(name.replace(f"-{version}.dist", f"-{version}+cpu.dist"), data)
        record = f"torchvision-{version}+cpu.dist-info/RECORD"
        new.writestr(record, "".join(f"{name},,\n" for name in (*new.namelist(), record)))


@pytest.mark.soak
def test_the_cpu_image_trains_and_is_small(tmp_path, served_folder, tags):
    """With a CPU build of torch that pip finds here: an older one than the list's."""
    address, folder = served_folder
    copy_checkout(tmp_path / "source")
    source = tmp_path / "source"
    for name, version in (("torch", "2.13.0+cpu"), ("torchvision", "0.28.0")):
        place = folder / "cpu" / name
        place.mkdir(parents=True)
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={place}"]
        if subprocess.run([*line, f"{name}=={version}"], capture_output=True).returncode:
            pytest.skip(f"pip finds no {name}=={version} here")
        (wheel,) = place.glob("*.whl")
        if name == "torchvision":
            target = place / wheel.name.replace(version, f"{version}+cpu")
            torchvision_for_cpu(wheel, target)
            wheel = target
        (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
        for file in ("environment.yml", "locks/image.txt"):
            text = (source / file).read_text()
            if file == "environment.yml":
                text = re.sub(f" {name}==\\S+", f" {name}=={version.partition('+')[0]}", text)
            else:
                text = re.sub(rf"^{name}==.*\n(?:    .*\n)+", "", text, flags=re.M)
            (source / file).write_text(text)
    variables = {"TORCH": "cpu", "TORCH_INDEX_URL": f"{address}/cpu"}
    done = make(source, "lock", **variables)
    assert done.returncode == 0, done.stdout
    done = build(tags[0], source, **build_variables() | variables)
    assert done.returncode == 0, done.stdout[-3000:]
    size = int(docker("image", "inspect", "--format={{.Size}}", tags[0]).stdout)
    (tmp_path / "model").mkdir()
    mounted = ("--volume", f"{tmp_path / 'model'}:/opt/ml/model")
    done = docker("run", "--rm", "--network=none", *mounted, tags[0], "train")
    assert done.returncode == 0 and (tmp_path / "model/model.pt").exists(), done.stdout
    print("bytes of the image:", size)
    assert size <= 1.2e9


def test_a_tampered_wheel_ends_the_build(cpu, served_folder, tags):
    """The index serves another file of the same name and version; then it lacks the package."""
    source, variables = cpu
    (wheel,) = (served_folder[1] / "cpu/torch").glob("*.whl")
    with wheel.open("ab") as file:
        file.write(b"\0")
    done = build(tags[0], source, **variables)
    assert done.returncode != 0 and "Hash mismatch for `torch==" in done.stdout
    line = "error: locks/image-cpu.txt: the index serves another file than the one that was locked"
    assert line in done.stdout
    shutil.rmtree(wheel.parent)
    done = build(tags[0], source, **variables)
    line = "error: locks/image-cpu.txt: the index lacks a package of this lock; set PIP_INDEX_URL"
    assert done.returncode != 0 and line in done.stdout, done.stdout[-3000:]


def test_another_cuda_and_another_python(source: Path, tags):
    """Both reach conda. The stand-in has only the system's Python."""
    (source / "locks/image-cu126.txt").touch()
    done = build(tags[0], source, "--target=environment", **build_variables(), TORCH="cu126")
    assert done.returncode == 0, done.stdout[-3000:]
    packages = output_in_image(
        tags[0], "cat", "/opt/conda/envs/sagemaker-lightning/conda-meta/packages"
    )
    assert packages.split() == ["python=3.11", "pip", "cuda-compat=12.6"]
    for version, line in (
        ("3.13", "the system has no python3.13"),
        ("3.10", "error: PYTHON_VERSION: found '3.10', allowed are 3.11, 3.12 and 3.13"),
    ):
        done = build(
            tags[0], source, "--target=environment", **build_variables(), PYTHON_VERSION=version
        )
        assert done.returncode != 0 and line in done.stdout, done.stdout[-3000:]


def test_what_conda_installed_is_locked(source: Path, tags):
    """`make lock-conda`; the next build has conda install these files, each with its SHA-256."""
    done = build(tags[0], source, "--target=environment", **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    done = make(source, "lock-conda", IMAGE=tags[0])
    lock = source / "locks/conda-3.11.txt"
    assert done.returncode == 0 and "/python-3.11-" in lock.read_text(), done.stdout
    done = build(tags[1], source, "--target=environment", **build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    packages = output_in_image(
        tags[1], "cat", "/opt/conda/envs/sagemaker-lightning/conda-meta/packages"
    )
    assert packages.split() == ["python=3.11", "pip=1", "cuda-compat=13.2"]
    lock.write_text(re.sub("#[0-9a-f]{64}", "", lock.read_text()))
    done = build(tags[1], source, "--target=environment", **build_variables())
    line = "error: locks/conda-3.11.txt: conda cannot install it (see above); if a checksum differs"
    assert done.returncode != 0 and line in done.stdout, done.stdout[-3000:]


# EFA ----------------------------------------------------------------------------------------------


@pytest.fixture
def installer(served_folder) -> dict[str, str]:
    """A stand-in of AWS's installer, served; and the variables of a build with it."""
    address, folder = served_folder
    with tarfile.open(folder / "efa.tar.gz", "w:gz") as archive:
        archive.add(
            ROOT / "tests/image/efa_installer_stand_in.sh", "aws-efa-installer/efa_installer.sh"
        )
    digest = hashlib.sha256((folder / "efa.tar.gz").read_bytes()).hexdigest()
    return {"EFA": "1", "EFA_URL": f"{address}/efa.tar.gz", "EFA_SHA256": digest}


def test_efa_is_a_build_argument(source: Path, tags, installer, tmp_path):
    """The doctor finds both libraries, the linker NCCL's, and a job the provider."""
    done = build(tags[0], source, **build_variables() | installer)
    assert done.returncode == 0, done.stdout[-3000:]
    host = tmp_path / "host"  # with a device, and the image's own folders
    for name in ("dev/infiniband/uverbs0", "sys/class/infiniband/rdmap16s27/device/vendor"):
        (host / name).parent.mkdir(parents=True)
        (host / name).write_text("0x1d0f\n")
    (host / "opt").symlink_to("/opt")
    code = """
        from pathlib import Path
        from sagemaker_lightning.contract import rendezvous
        from sagemaker_lightning.doctor import checks
        print(*checks.efa(checks.Machine(root=Path("/host"))))
        print(rendezvous._has_efa_provider())
    """
    code = re.sub("^        ", "", code, flags=re.M)
    mounted = ("--volume", f"{host}:/host:ro")
    done = docker("run", "--rm", *mounted, tags[0], "python", "-c", code)
    assert done.stdout.splitlines() == [
        "ok    EFA: device rdmap16s27, with libfabric and aws-ofi-nccl",
        "True",
    ]
    linked = output_in_image(
        tags[0], "cat", "/etc/ld.so.conf.d/sagemaker-lightning-efa.conf"
    ).split()
    assert linked == ["/opt/amazon/efa/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"]


def test_an_efa_installer_with_another_checksum_is_not_run(source: Path, tags, installer):
    done = build(tags[0], source, **build_variables() | installer | {"EFA_SHA256": "0" * 64})
    line = f"error: EFA_SHA256: found {installer['EFA_SHA256']}, expected {'0' * 64}: "
    assert done.returncode != 0 and line in done.stdout, done.stdout[-3000:]
    assert docker("image", "inspect", tags[0]).returncode != 0
