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

from sagemaker_rehearsal.engines import bridge

# test_container.py has the image as it is, test_locks.py the locks.
pytestmark = [pytest.mark.docker, pytest.mark.thorough]

SOURCE_DATE_EPOCH = 315532800  # the Dockerfile's
SITE_PACKAGES = "/opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages"


def stanzas(lock: str, *packages: str) -> str:
    """Return a part of a lock: the stanzas of these packages."""
    package_stanzas = {match[1]: match[0] for match in STANZA_PATTERN.finditer(lock)}
    return "".join(package_stanzas[package] for package in packages)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout with few packages, and an SBOM of nothing."""
    copy_checkout(tmp_path / "source")
    few_packages = stanzas(
        LOCK_TEXTS["image"], "pip", "sagemaker-training", "six", "typing-extensions"
    )
    (tmp_path / "source/locks/image.txt").write_text(few_packages)
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
    network = json.loads(docker("network", "inspect", "bridge").stdout)[0]
    (tmp_path / "served").mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(
        (bridge.of_docker(network), 0), partial(Handler, directory=tmp_path / "served")
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{server.server_address[0]}:{server.server_port}", tmp_path / "served"
    server.shutdown()
    thread.join()
    server.server_close()


def run_in_image(tag: str, *command: str) -> str:
    completed = docker("run", "--rm", "--entrypoint=", tag, *command)
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


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
                member.name: (
                    member.type,
                    member.mode,
                    member.size,
                    member.mtime,
                    hashlib.sha256(layer.extractfile(member).read()).hexdigest()
                    if member.isreg()
                    else member.linkname,
                )
                for member in layer
            }


def differences(first_tag: str, second_tag: str) -> list[str]:
    """Return what differs between the layers of two images."""
    difference_lines = []
    for number, (first_layer, second_layer) in enumerate(
        zip(layers(first_tag), layers(second_tag), strict=True)
    ):
        if first_layer != second_layer:
            first_contents = layer_contents(first_tag, number)
            second_contents = layer_contents(second_tag, number)
            difference_lines += [
                f"layer {number}: {name}: {first_contents.get(name)}, {second_contents.get(name)}"
                for name in sorted(first_contents.keys() | second_contents.keys())
                if first_contents.get(name) != second_contents.get(name)
            ]
    return difference_lines


def rebuilt_instructions(first_tag: str, second_tag: str) -> list[str]:
    """Return the second image's instructions that did not come from the first one's cache."""
    format_ = "--format={{.CreatedAt}}\t{{.CreatedBy}}"
    history_lines = [
        docker("history", "--no-trunc", format_, tag).stdout.splitlines()
        for tag in (first_tag, second_tag)
    ]
    return [line.partition("\t")[2] for line in history_lines[1] if line not in history_lines[0]]


def test_two_builds_have_layers_of_the_same_bytes(source: Path, tags, tmp_path):
    """The checkouts' files differ in times and modes; only the system comes from a cache.

    conda's address is part of the cache's key, but not of the image.
    """
    completed = build(tags[0], source, **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    other_source = shutil.copytree(source, tmp_path / "other", copy_function=shutil.copy)
    for path in other_source.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    mirror = {"CONDA_CHANNEL_ALIAS": "https://conda.example"}
    completed = build(tags[1], other_source, **build_variables() | mirror)
    assert completed.returncode == 0, completed.stdout[-3000:]
    rebuilt = "\n".join(rebuilt_instructions(*tags))
    for instruction in (
        "make_conda_environment.sh",
        "install_locked.sh",
        "install_bolts.sh",
        "/runtime",
    ):
        assert instruction in rebuilt, rebuilt
    assert layers(tags[0]) == layers(tags[1]), differences(*tags)[:20]


@pytest.mark.soak
def test_the_whole_image_built_again_has_layers_of_the_same_bytes(image: str, tags):
    """Nothing comes from a cache, and only the layers that apt writes may differ."""
    completed = build(tags[0], ROOT, "--no-cache", **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    completed = build(tags[1], ROOT, "--target=system", **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    system_layers = len(layers(tags[1]))
    assert layers(image)[system_layers:] == layers(tags[0])[system_layers:]
    assert len(layers(image)) > system_layers + 8


def test_byte_code_is_for_the_sources_as_they_are(source: Path, tags):
    """Byte code has the date of its source, so that Python loads it.

    A source that is changed later is compiled again.
    """
    completed = build(tags[0], source, **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    code = f"""
        import pathlib, struct, sys
        site = pathlib.Path("{SITE_PACKAGES}")
        headers = [path.read_bytes()[:12] for path in site.rglob("*.pyc")]
        print(len(headers), {{struct.unpack("<4sII", header)[1:] for header in headers}})
        (site / "six.py").write_text("changed = True")
        import six
        print(six.changed, six.__cached__)
    """
    lines = run_in_image(
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
    packages_list = (source / "environment.yml").read_text()
    kept_packages = re.sub(
        r"^ +- (?!torch==|torchvision==|psutil)\S+==.*\n", "", packages_list, flags=re.M
    )
    (source / "environment.yml").write_text(kept_packages)
    for package in ("torch", "torchvision"):
        version = re.search(rf" {package}==(\S+)", packages_list)[1]
        (folder / "cpu" / package).mkdir(parents=True)
        wheel = write_wheel(folder / "cpu" / package, package, f"{version}+cpu")
        (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    shutil.copy(ROOT / "locks/image.txt", source / "locks/image.txt")
    variables = {"TORCH": "cpu", "TORCH_INDEX_URL": f"{address}/cpu"}
    completed = make(source, "lock", **variables)
    assert completed.returncode == 0, completed.stdout
    return source, build_variables() | variables


def make(source: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    make_variables = {"UV_FOLDER": str(ROOT / ".venvs/uv"), "DOCKER": DOCKER} | variables
    command = ("make", *command, *(f"{name}={value}" for name, value in make_variables.items()))
    return subprocess.run(
        command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_cpu_build_of_torch(cpu, tags):
    """`make lock TORCH=cpu` and `make build TORCH=cpu`, from a stand-in of PyTorch's index."""
    source, variables = cpu
    lock = (source / "locks/image-cpu.txt").read_text()
    assert "#    make lock TORCH=cpu\n" in lock
    assert re.search(r"^torch==[\d.]+\+cpu \\\n    --hash=sha256:[0-9a-f]{64}$", lock, re.M)
    assert stanzas(lock, "psutil").split() >= stanzas(LOCK_TEXTS["image"], "psutil").split()[:2]
    completed = build(tags[0], source, **variables)
    assert completed.returncode == 0, completed.stdout[-3000:]
    listed = run_in_image(tags[0], "ls", SITE_PACKAGES, "/opt/conda/envs/sagemaker-lightning")
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
    with zipfile.ZipFile(wheel) as wheel_archive, zipfile.ZipFile(target, "w") as cpu_archive:
        names = [name for name in wheel_archive.namelist() if not name.endswith((".so", "/RECORD"))]
        for name in names:
            content = (
                wheel_archive.read(name).decode()
                if name.endswith((".py", "METADATA"))
                else wheel_archive.read(name)
            )
            if name.endswith("_meta_registrations.py"):
                content = content.replace("import torch\n", f"import torch\n{declared}", 1)
            elif name.endswith("METADATA"):
                content = content.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
            cpu_archive.writestr(name.replace(f"-{version}.dist", f"-{version}+cpu.dist"), content)
        record = f"torchvision-{version}+cpu.dist-info/RECORD"
        cpu_archive.writestr(
            record, "".join(f"{name},,\n" for name in (*cpu_archive.namelist(), record))
        )


@pytest.mark.soak
def test_the_cpu_image_trains_and_is_small(tmp_path, served_folder, tags):
    """The CPU build of torch is one that pip finds here, older than the list's."""
    address, folder = served_folder
    copy_checkout(tmp_path / "source")
    source = tmp_path / "source"
    for name, version in (("torch", "2.13.0+cpu"), ("torchvision", "0.28.0")):
        index_folder = folder / "cpu" / name
        index_folder.mkdir(parents=True)
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            f"--dest={index_folder}",
        ]
        if subprocess.run([*download, f"{name}=={version}"], capture_output=True).returncode:
            pytest.skip(f"pip finds no {name}=={version} here")
        (wheel,) = index_folder.glob("*.whl")
        if name == "torchvision":
            target = index_folder / wheel.name.replace(version, f"{version}+cpu")
            torchvision_for_cpu(wheel, target)
            wheel = target
        (index_folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
        for file in ("environment.yml", "locks/image.txt"):
            packages_text = (source / file).read_text()
            if file == "environment.yml":
                packages_text = re.sub(
                    f" {name}==\\S+", f" {name}=={version.partition('+')[0]}", packages_text
                )
            else:
                packages_text = re.sub(
                    rf"^{name}==.*\n(?:    .*\n)+", "", packages_text, flags=re.M
                )
            (source / file).write_text(packages_text)
    variables = {"TORCH": "cpu", "TORCH_INDEX_URL": f"{address}/cpu"}
    completed = make(source, "lock", **variables)
    assert completed.returncode == 0, completed.stdout
    completed = build(tags[0], source, **build_variables() | variables)
    assert completed.returncode == 0, completed.stdout[-3000:]
    size = int(docker("image", "inspect", "--format={{.Size}}", tags[0]).stdout)
    (tmp_path / "model").mkdir()
    mounted = ("--volume", f"{tmp_path / 'model'}:/opt/ml/model")
    completed = docker("run", "--rm", "--network=none", *mounted, tags[0], "train")
    assert completed.returncode == 0 and (tmp_path / "model/model.pt").exists(), completed.stdout
    print("bytes of the image:", size)
    assert size <= 1.2e9


def test_a_tampered_wheel_ends_the_build(cpu, served_folder, tags):
    """The index serves another file of the same name and version; then it lacks the package."""
    source, variables = cpu
    (wheel,) = (served_folder[1] / "cpu/torch").glob("*.whl")
    with wheel.open("ab") as file:
        file.write(b"\0")
    completed = build(tags[0], source, **variables)
    assert completed.returncode != 0 and "Hash mismatch for `torch==" in completed.stdout
    error_line = (
        "error: locks/image-cpu.txt: the index serves another file than the one that was locked"
    )
    assert error_line in completed.stdout
    shutil.rmtree(wheel.parent)
    completed = build(tags[0], source, **variables)
    error_line = (
        "error: locks/image-cpu.txt: the index lacks a package of this lock; set PIP_INDEX_URL"
    )
    assert completed.returncode != 0 and error_line in completed.stdout, completed.stdout[-3000:]


def test_another_cuda_and_another_python(source: Path, tags):
    """Both versions reach conda. The stand-in has only the system's Python."""
    (source / "locks/image-cu126.txt").touch()
    completed = build(tags[0], source, "--target=environment", **build_variables(), TORCH="cu126")
    assert completed.returncode == 0, completed.stdout[-3000:]
    packages = run_in_image(
        tags[0], "cat", "/opt/conda/envs/sagemaker-lightning/conda-meta/packages"
    )
    assert packages.split() == ["python=3.11", "pip", "cuda-compat=12.6"]
    for version, message in (
        ("3.13", "the system has no python3.13"),
        ("3.10", "error: PYTHON_VERSION: found '3.10', expected 3.11, 3.12 and 3.13"),
    ):
        completed = build(
            tags[0], source, "--target=environment", **build_variables(), PYTHON_VERSION=version
        )
        assert completed.returncode != 0 and message in completed.stdout, completed.stdout[-3000:]


def test_what_conda_installed_is_locked(source: Path, tags):
    """After `make lock-conda`, conda installs the locked files and checks their SHA-256."""
    completed = build(tags[0], source, "--target=environment", **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    completed = make(source, "lock-conda", IMAGE=tags[0])
    lock = source / "locks/conda-3.11.txt"
    assert completed.returncode == 0 and "/python-3.11-" in lock.read_text(), completed.stdout
    completed = build(tags[1], source, "--target=environment", **build_variables())
    assert completed.returncode == 0, completed.stdout[-3000:]
    packages = run_in_image(
        tags[1], "cat", "/opt/conda/envs/sagemaker-lightning/conda-meta/packages"
    )
    assert packages.split() == ["python=3.11", "pip=1", "cuda-compat=13.2"]
    lock.write_text(re.sub("#[0-9a-f]{64}", "", lock.read_text()))
    completed = build(tags[1], source, "--target=environment", **build_variables())
    error_line = (
        "error: locks/conda-3.11.txt: conda cannot install it (see above); if a checksum differs"
    )
    assert completed.returncode != 0 and error_line in completed.stdout, completed.stdout[-3000:]


# EFA ----------------------------------------------------------------------------------------------


@pytest.fixture
def installer(served_folder) -> dict[str, str]:
    """Serve a stand-in of AWS's installer, and return the variables of a build with it."""
    address, folder = served_folder
    with tarfile.open(folder / "efa.tar.gz", "w:gz") as archive:
        archive.add(
            ROOT / "tests/image/efa_installer_stand_in.sh", "aws-efa-installer/efa_installer.sh"
        )
    digest = hashlib.sha256((folder / "efa.tar.gz").read_bytes()).hexdigest()
    return {"EFA": "1", "EFA_URL": f"{address}/efa.tar.gz", "EFA_SHA256": digest}


def test_efa_is_a_build_argument(source: Path, tags, installer, tmp_path):
    """The doctor finds both libraries, the linker finds NCCL's, and a job finds the provider."""
    completed = build(tags[0], source, **build_variables() | installer)
    assert completed.returncode == 0, completed.stdout[-3000:]
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
    completed = docker("run", "--rm", *mounted, tags[0], "python", "-c", code)
    assert completed.stdout.splitlines() == [
        "ok    EFA: device rdmap16s27, with libfabric and aws-ofi-nccl",
        "True",
    ]
    linked = run_in_image(tags[0], "cat", "/etc/ld.so.conf.d/sagemaker-lightning-efa.conf").split()
    assert linked == ["/opt/amazon/efa/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"]
