"""The image: built, and run by a Docker engine; only its base and Miniconda are stand-ins.

The stand-ins come from tests/image.
"""

import json
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import sweeper
import torch
from conftest import write_cifar
from containers import DOCKER, ROOT, build, build_variables, docker
from environments import packages_of
from gpu_hosts import gpu_host
from terminal import Terminal
from torchvision.models import resnet18

pytestmark = pytest.mark.docker


@pytest.fixture
def container(image: str):
    """Run a container of the image, and return `docker run`'s result.

    It is removed after the test.
    """
    names = []

    def run(
        *arguments: str, options: tuple[str, ...] = (), **settings
    ) -> subprocess.CompletedProcess:
        names.append(f"sagemaker-lightning-{uuid.uuid4().hex[:12]}")
        completed = docker("run", "--name", names[-1], *options, image, *arguments, **settings)
        completed.container = names[-1]
        return completed

    yield run
    for name in names:
        docker("rm", "--force", "--volumes", name)


def inspect(image: str) -> dict:
    return json.loads(docker("image", "inspect", image).stdout)[0]


def mount(source: Path, target: str, mode: str = "rw") -> tuple[str, ...]:
    return ("--volume", f"{source}:{target}:{mode}")


def test_without_data_and_without_a_network(container, image, tmp_path):
    """Shortened; with nothing mounted at all, README's first command in a container runs."""
    (tmp_path / "hyperparameters.json").write_text(
        '{"trainer.max_epochs": "1", "trainer.limit_train_batches": "5"}'
    )
    hyperparameters_mount = mount(
        tmp_path / "hyperparameters.json", "/opt/ml/input/config/hyperparameters.json", "ro"
    )
    run = container("train", options=("--network", "none", *hyperparameters_mount))
    assert run.returncode == 0, run.stdout
    assert docker("cp", f"{run.container}:/opt/ml/model", str(tmp_path)).returncode == 0
    state = torch.load(tmp_path / "model/model.pt", weights_only=True)
    resnet18(num_classes=10).load_state_dict(state)
    description = json.loads((tmp_path / "model/model.json").read_text())
    assert description["data_class_path"] == "app.data.DigitsDataModule"
    assert (
        description["revision"]
        == inspect(image)["Config"]["Labels"]["org.opencontainers.image.revision"]
    )


def test_a_user_without_a_name_in_a_container_that_is_read_only(container, tmp_path):
    """The container runs as rootless engines and strict clusters run it.

    The folders that it writes to are mounted; nothing else can be written.
    """
    user = (
        "--user",
        "54321",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
    )
    mounts = ()
    for name, target in (("model", "model"), ("output", "output"), ("config", "input/config")):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
        mounts += mount(tmp_path / name, f"/opt/ml/{target}")
    (tmp_path / "config/hyperparameters.json").write_text(
        '{"trainer.max_steps": "1", "data.batch_size": "256"}'
    )
    run = container("train", options=(*user, *mounts))
    assert run.returncode == 0 and (tmp_path / "model/model.pt").is_file(), run.stdout
    run = container("train", options=(*user, *mounts[:-2]))
    assert run.returncode == 1 and run.stdout == (
        "error: /opt/ml/input/config: no folder that user 54321 can write; mount one at each "
        "(docker run --volume FOLDER:/opt/ml/input/config ...)\n"
    )
    run = container("train", options=user)
    assert run.stdout.startswith("error: /opt/ml/output, /opt/ml/model, /opt/ml/input/config: no f")


def test_another_user_needs_no_folder(container):
    """Whatever the user's number is."""
    run = container(
        "bash",
        "-c",
        "set -e; cd /opt/ml; for name in model output output/data input/config input/data code; do "
        "touch $name/mine; done",
        options=("--user", "54321"),
    )
    assert run.returncode == 0, run.stdout


def test_help_says_what_runs(container):
    """Each command that it names runs; test_a_block_of_a_page has one with a flag."""
    printed = container("--help")
    assert printed.returncode == 0, printed.stdout
    commands = re.findall(r"^  (python \S.*?)(?:  .*)?$", printed.stdout, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        if "--FLAG=VALUE" not in command:
            assert container(*command.split()).returncode == 0, command
    for word in ("serve", "--trainer.max_epochs=1", "--"):
        run = container(word)
        assert run.returncode == 127 and run.stdout.startswith(f"error: '{word}': "), run.stdout


def test_the_command_may_be_left_out(container):
    """SageMaker SDK 3's local mode gives no command."""
    assert (
        "train takes no flags"
        not in container(options=("--env", "SAGEMAKER_PROGRAM=nothing.py")).stdout
    )


@pytest.mark.parametrize(
    "options",
    [("--read-only",), ("--tmpfs", "/opt/ml/output:ro"), ("--tmpfs", "/opt/ml/output:size=64k")],
    ids=["read-only container", "read-only output", "full output"],
)
def test_an_output_that_cannot_be_written_is_not_a_success(container, options):
    run = container("train", options=options)
    assert run.returncode == 1, run.stdout
    assert run.stdout.startswith("error: /opt/ml")


def test_a_shell_that_nothing_activated_finds_the_environment(container):
    """SageMaker SDK 3 bypasses the entry point and looks for these three programs."""
    run = container(
        "-c",
        "command -v python pip bash && python -c 'import app, sagemaker_training'",
        options=("--entrypoint", "bash"),
    )
    assert run.returncode == 0, run.stdout
    python, pip, _ = run.stdout.split()
    assert python == "/opt/conda/envs/sagemaker-lightning/bin/python"
    assert pip == "/opt/conda/envs/sagemaker-lightning/bin/pip"


SAVING_PROGRAM = """
import signal, sys, time
def save(number, frame):
    time.sleep(2)
    print("SAVED", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("/opt/ml/output/data/ready", "w")
time.sleep(120)
"""


def stopped(output: Path, *arguments: str) -> tuple[str, int]:
    """Stop a container of SAVING_PROGRAM once it runs; return what it printed and its status.

    Args:
        output: The folder that is mounted at /opt/ml/output.
        arguments: Those of `docker run`.
    """
    container_id = docker("run", "--detach", *arguments).stdout.strip()
    try:
        for _ in range(600):
            if (output / "data/ready").exists():
                break
            time.sleep(0.1)
        docker("stop", "--time", "60", container_id)
        printed = docker("logs", container_id).stdout
        status = docker("inspect", "--format", "{{.State.ExitCode}}", container_id).stdout
        return printed, int(status)
    finally:
        docker("rm", "--force", "--volumes", container_id)


@pytest.mark.parametrize("options", [(), ("--init",)], ids=["as PID 1", "behind an init"])
def test_docker_stop_lets_the_program_save(image: str, tmp_path: Path, options):
    (tmp_path / "saver.py").write_text(SAVING_PROGRAM)
    (tmp_path / "hyperparameters.json").write_text('{"sagemaker_program": "saver.py"}')
    (tmp_path / "output").mkdir()
    mounts = mount(tmp_path / "saver.py", "/opt/ml/code/saver.py", "ro") + mount(
        tmp_path / "output", "/opt/ml/output"
    )
    mounts += mount(
        tmp_path / "hyperparameters.json", "/opt/ml/input/config/hyperparameters.json", "ro"
    )
    printed, status = stopped(tmp_path / "output", *options, *mounts, image, "train")
    assert "SAVED" in printed and "saver.py: ended with exit status 0 after SIGTERM" in printed
    assert status == 0


BASH_ENV = "/opt/sagemaker-lightning/sagemaker_lightning/launch/bash_env.sh"
SDK_SCRIPT = "/opt/ml/input/data/sm_drivers/sm_train.sh"
SDK_COMMAND = ("-c", f"chmod +x {SDK_SCRIPT} && {SDK_SCRIPT}")
# As SDK 3's: a shell script, whose driver starts the program and reads what it prints.
SDK_DRIVER = """
import subprocess, sys
program = subprocess.Popen([sys.executable, "/opt/ml/code/saver.py"], stdout=subprocess.PIPE)
for line in program.stdout:
    print(line.decode().strip(), flush=True)
sys.exit(program.wait())
"""


@pytest.fixture
def sdk_3_job(image, tmp_path) -> Callable[[str], tuple[Path, tuple[str, ...]]]:
    """A function that prepares a job of SDK 3's for a program.

    It returns the folder of its output, and arguments of `docker run`.
    """

    def prepare(program: str) -> tuple[Path, tuple[str, ...]]:
        names = ("sm_drivers", "code", "output", "config")
        drivers, code, output, config = (tmp_path / name for name in names)
        for folder in (drivers, code, output, output / "data", config):
            folder.mkdir()
        (config / "resourceconfig.json").write_text('{"current_host": "a", "hosts": ["a"]}')
        for name in ("hyperparameters", "inputdataconfig"):
            (config / f"{name}.json").write_text("{}")
        (code / "saver.py").write_text(program)
        (code / "own.sh").write_text(f"echo OWN READ\n. {BASH_ENV}\n")
        (drivers / "driver.py").write_text(SDK_DRIVER)
        (drivers / "sm_train.sh").write_text(
            f"#!/bin/bash\nset -e\npython3 {Path(SDK_SCRIPT).with_name('driver.py')}\n"
        )
        mounts = mount(drivers, "/opt/ml/input/data/sm_drivers")
        mounts += mount(code, "/opt/ml/code", "ro") + mount(output, "/opt/ml/output")
        mounts += mount(config, "/opt/ml/input/config", "ro")
        return output, (*mounts, "--entrypoint", "/bin/bash", image, *SDK_COMMAND)

    return prepare


@pytest.mark.parametrize(
    "options",
    [(), ("--init",), ("--env", "BASH_ENV=/opt/ml/code/own.sh")],
    ids=["as PID 1", "behind an init", "with a BASH_ENV of its own that reads ours"],
)
def test_docker_stop_reaches_a_program_that_sdk_3_starts_by_a_shell(sdk_3_job, options):
    output, arguments = sdk_3_job(SAVING_PROGRAM.replace("sys.exit(0)", "sys.exit(143)"))
    printed, status = stopped(output, *options, *arguments)
    assert "SAVED" in printed and status == 143, printed
    assert ("OWN READ" in printed) == ("--env" in options)
    assert (output / "failure").read_text().startswith("interrupted, resume from step 0: ")


DIES_ONCE = """
import os, signal
mark = "/opt/ml/output/data/died"
if not os.path.exists(mark):
    open(mark, "w")
    os.kill(os.getpid(), signal.SIGKILL)
print("BACK", os.environ["SAGEMAKER_LIGHTNING_RESTARTS"], flush=True)
"""


def test_a_program_that_sdk_3_starts_is_started_again(sdk_3_job):
    output, arguments = sdk_3_job(DIES_ONCE)
    run = docker("run", "--rm", *arguments)
    assert run.returncode == 0, run.stdout
    assert "restart 1 in this container (at most 3 an hour): " in run.stdout
    assert "BACK [{" in run.stdout
    assert not (output / "failure").exists()


def test_other_shells_are_as_before(container, tmp_path: Path):
    """A person's, a script's, one in strict mode, and one with a BASH_ENV of its own."""
    (tmp_path / "own.sh").write_text("echo own")
    own = (*mount(tmp_path, "/own", "ro"), "--env", "BASH_ENV=/own/own.sh")
    for options, arguments, printed in (
        ((), ("-c", "echo $$"), "1\n"),
        ((), ("-euc", "bash -euc 'echo $((1 + 1))'"), "2\n"),
        ((), ("-pc", "echo sm_train.sh"), "sm_train.sh\n"),
        ((), ("-c", "echo a/sm_train.sh; true"), "a/sm_train.sh\n"),
        (own, ("-c", "echo sm_train.sh"), "own\nsm_train.sh\n"),
    ):
        run = container(*arguments, options=("--entrypoint", "/bin/bash", *options))
        assert (run.returncode, run.stdout) == (0, printed)


def test_out_of_host_memory_is_the_reason(container, tmp_path: Path):
    """The kernel kills the program, which cannot report anything any more."""
    (tmp_path / "output").mkdir()
    limits = ("--memory", "400m", "--memory-swap", "400m")
    run = container("train", options=limits + mount(tmp_path / "output", "/opt/ml/output"))
    assert run.returncode not in (0, 137), run.stdout
    failure = (tmp_path / "output/failure").read_text()
    assert re.match(r"error: .*out of host memory", failure)


def test_what_is_in_the_image_and_what_is_not(container, image: str):
    absent = "/root/.cache /tmp/wheels /tmp/miniconda.sh /opt/sagemaker-lightning/tests"
    script = f"""
        for name in gcc cc g++ make ssh; do ! command -v $name || exit 1; done
        for path in {absent}; do [[ ! -e $path ]] || {{ echo $path; exit 1; }}; done
        [[ -z $(ls /var/lib/apt/lists) ]] || exit 1
        pip check
        pip list --format=freeze && find /opt/conda -name '*.conda' -o -name '*.whl' | head
    """
    run = container("bash", "-c", script)
    assert run.returncode == 0, run.stdout
    pinned = re.findall(
        r"^ +- ([a-z0-9-]+)(?:\[.*\])?==(\S+)", (ROOT / "environment.yml").read_text(), re.MULTILINE
    )
    installed = dict(
        line.lower().replace("_", "-").split("==")
        for line in run.stdout.splitlines()
        if "==" in line
    )
    assert len(pinned) == 12
    assert {name: installed.get(name) for name, _ in pinned} == dict(pinned)
    complaints = re.findall(r"^(\S+) \S+ (?:has requirement|requires)", run.stdout, re.MULTILINE)
    assert complaints == ["lightning-bolts"]
    assert {
        (name, version)
        for name, version in installed.items()
        if version not in locked_versions(name)
    } == set()

    description = inspect(image)
    assert description["Size"] <= 6.5e9
    assert description["Config"]["Cmd"] == ["train"]
    variables = dict(line.split("=", 1) for line in description["Config"]["Env"])
    assert variables["SAGEMAKER_PROGRAM"] == "app/train_multi_node.py"
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["PATH"].split(":")[0] == "/opt/conda/envs/sagemaker-lightning/bin"
    labels = description["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"]
    assert labels["org.opencontainers.image.revision"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.source"]


def test_the_history_of_the_image(container, image: str):
    """The history has no password, and the layers are as large as the files: none is in two."""
    history = docker("history", "--no-trunc", "--format={{.CreatedBy}}", image).stdout
    assert not re.search(r"://[^/\s]*@|(?i:password|secret|token)\S*=", history), history
    run = container(
        "bash", "-c", "du --summarize --one-file-system --bytes / && find / -xdev -type d | wc -l"
    )
    size, folders = (int(line.split()[0]) for line in run.stdout.splitlines())
    assert inspect(image)["Size"] < 1.01 * (size - 4096 * folders) + 20e6, run.stdout


CARD_PACKAGES = (
    "sagemaker_training",
    "pytorch_lightning",
    "torch",
    "torchvision",
    "pl_bolts.datamodules",
    "jsonargparse",
)


def test_each_package_of_the_projects_card_is_imported(container):
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name))"
    completed = container("python", "-W", "ignore", "-c", code, *CARD_PACKAGES)
    assert completed.returncode == 0, completed.stdout
    for package in CARD_PACKAGES:
        assert f"<module '{package}' from " in completed.stdout, completed.stdout


def test_conda_is_in_the_image(container):
    assert re.search(r"^conda \d", container("conda", "--version").stdout, re.MULTILINE)


def locked_versions(name: str) -> set[str]:
    """Return the allowed versions of a package in the image."""
    lock_texts = ((ROOT / f"locks/{lock}.txt").read_text() for lock in ("image", "bolts"))
    return {
        version
        for lock_text in lock_texts
        for version in re.findall(rf"^{name}==(\S+)", lock_text, re.MULTILINE)
    }


def test_what_is_in_the_image_is_listed_with_its_licences(container):
    """The SBOM has every Python package that pip finds, and the licences have each of them."""
    run = container(
        "bash",
        "-c",
        "cat sbom/packages.cdx.json && echo && echo ==== && pip list --format=freeze && "
        "grep -c '' sbom/licenses.txt && grep -A2 '^torch$' sbom/licenses.txt",
    )
    assert run.returncode == 0, run.stdout
    bom_text, _, rest_of_output = run.stdout.partition("\n====\n")
    bom = json.loads(bom_text)
    assert bom["bomFormat"] == "CycloneDX"
    components = {
        f"{component['name']}=={component['version']}".lower().replace("_", "-")
        for component in bom["components"]
    }
    installed = {
        line.lower().replace("_", "-") for line in rest_of_output.splitlines() if "==" in line
    }
    assert components == installed and len(installed) > 80
    assert rest_of_output.splitlines()[-3:-1] == [
        "torch",
        next(line for line in installed if line.startswith("torch=="))[7:],
    ]


def test_the_doctor_and_an_older_driver_in_the_image(container, tmp_path: Path):
    """The host's driver and GPU are stand-ins, and so are cuda-compat's libraries (tests/image)."""
    gpu_host(tmp_path, "535.183.01", "NVIDIA A10G")
    options = (*mount(tmp_path, "/host", "ro"), "--env", "SAGEMAKER_LIGHTNING_ROOT=/host")
    run = container(
        "bash",
        "-c",
        "echo path=$LD_LIBRARY_PATH; python -m sagemaker_lightning.doctor",
        options=options,
    )
    assert run.returncode == 1, run.stdout  # torch finds no GPU
    assert "path=/opt/conda/envs/sagemaker-lightning/cuda-compat\n" in run.stdout
    assert (
        "note  GPU driver: GPU driver 535.183.01 is older than CUDA 13.2 needs (R580); "
        "NVIDIA's comp"
    ) in run.stdout
    assert "WRONG torch: cannot compute on the GPU (" in run.stdout
    assert run.stdout.endswith("1 wrong\n")
    run = container("python", "-m", "sagemaker_lightning.doctor")
    assert run.returncode == 0, run.stdout
    assert "ok    NCCL: " in run.stdout and run.stdout.endswith("nothing is wrong\n")


def test_pip_takes_no_malicious_release_in_the_image(container):
    """Without a network pip would fail, too, but with another line."""
    run = container("pip", "install", "lightning==2.6.3", options=("--network", "none"))
    assert run.returncode == 1 and "conflicting dependencies" in run.stdout, run.stdout


def test_lightning_bolts_is_in_the_image(container):
    code = (
        "from pl_bolts.datamodules import CIFAR10DataModule as D; "
        "print('classes', D('/tmp').num_classes)"
    )
    assert "classes 10" in container("python", "-W", "ignore", "-c", code).stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the image's sources that the test may change."""
    for name in ("app", "sagemaker_lightning", "scripts", "locks"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name)
    for name in ("Dockerfile", "Makefile", ".dockerignore", "entrypoint.sh", "environment.yml"):
        shutil.copy2(ROOT / name, tmp_path / "source" / name)
    return tmp_path / "source"


@pytest.fixture
def tag():
    """A tag for one test, removed after it."""
    name = f"sagemaker-lightning-test:{uuid.uuid4().hex[:12]}"
    yield name
    docker("image", "rm", "--force", name)


def layers(image: str) -> list[str]:
    return inspect(image)["RootFS"]["Layers"]


def test_a_change_of_the_code_adds_kilobytes(image: str, source: Path, tag: str):
    with (source / "app/model.py").open("a") as file:
        file.write("# changed\n")
    run = build(tag, source, **build_variables())
    assert run.returncode == 0, run.stdout[-3000:]
    assert layers(tag)[-1] != layers(image)[-1] and layers(tag)[:-1] == layers(image)[:-1]
    changed = docker("run", "--rm", tag, "tail", "-n1", "/opt/sagemaker-lightning/app/model.py")
    assert changed.stdout == "# changed\n"
    sizes = [
        int(size)
        for size in docker("history", "--human=false", "--format", "{{.Size}}", tag).stdout.split()
    ]
    # The newest layer comes first; an entry that only describes the image has no size.
    assert 0 < next(filter(None, sizes)) < 1_000_000


@pytest.mark.thorough
def test_the_program_is_a_build_argument(image: str, tag: str, tmp_path: Path):
    run = build(tag, **build_variables(), SAGEMAKER_PROGRAM="app/train_torchrun.py")
    assert run.returncode == 0, run.stdout[-3000:]
    (tmp_path / "hyperparameters.json").write_text(
        '{"trainer.max_steps": "2", "trainer.devices": "2", "data.batch_size": "32", '
        '"trainer.accelerator": "cpu"}'
    )
    path = "/opt/ml/input/config/hyperparameters.json"
    completed = docker("run", "--rm", *mount(tmp_path / "hyperparameters.json", path, "ro"), tag)
    assert completed.returncode == 0, completed.stdout
    assert "MEMBER: 2/2" in completed.stdout


@pytest.mark.soak  # one build argument is tried above
def test_lightning_bolts_can_be_left_out(tag: str):
    run = build(tag, **build_variables(), LIGHTNING_BOLTS="0")
    assert run.returncode == 0, run.stdout[-3000:]
    assert (
        "No module named 'pl_bolts'"
        in docker("run", "--rm", tag, "python", "-c", "import pl_bolts").stdout
    )


@pytest.mark.soak
def test_loggers_are_a_build_argument(tag: str):
    run = build(tag, **build_variables(), LOGGERS="mlflow wandb")
    assert run.returncode == 0, run.stdout[-3000:]
    code = "import mlflow, sagemaker_mlflow, wandb; print(wandb.__version__)"
    (version,) = re.findall(r"wandb==(\S+)", (ROOT / "environment.yml").read_text())
    assert docker("run", "--rm", tag, "python", "-c", code).stdout.strip() == version
    listed = docker("run", "--rm", tag, "cat", "sbom/packages.cdx.json").stdout
    assert '"mlflow-skinny"' in listed
    run = build(tag, **build_variables(), LOGGERS="neptune")
    assert run.returncode != 0
    assert "error: LOGGERS: found neptune; expected mlflow or wandb" in run.stdout


@pytest.mark.thorough  # outside of it: test_drill.py
def test_a_job_is_drilled_in_the_image(image: str, tmp_path):
    """docs/drill.md has the command."""
    page = (ROOT / "docs/drill.md").read_text()
    (command,) = re.findall(r"^```sh\n(mkdir .*?)^```$", page, re.MULTILINE | re.DOTALL)
    command = command.replace("docker run", f"{DOCKER} run").replace(
        " sagemaker-lightning ", f" {image} "
    )
    # Batches of ten images: an epoch needs several.
    command = command.replace('"data.val_split": 0.2', '"data.batch_size": 4, "data.val_split": 20')
    write_cifar(tmp_path / "cifar10", images=10)
    completed = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "identical: 1 interruption;" in completed.stdout, completed.stdout + completed.stderr


@pytest.mark.thorough  # another image
def test_a_compiler_is_a_build_argument(image: str, tag: str):
    run = build(tag, **build_variables(), COMPILER="1")
    assert run.returncode == 0, run.stdout[-3000:]
    assert docker("run", "--rm", tag, "g++", "--version").stdout.startswith("g++")
    assert "not found" in docker("run", "--rm", image, "bash", "-c", "g++ --version").stdout


@pytest.mark.soak
def test_the_legacy_builder_builds_it_too(image: str, source: Path, tag: str):
    """BuildKit builds the fixture's image; the legacy builder runs every instruction, too.

    It installs only the toolkit among the packages: the others take disk and minutes.
    """
    lock = source / "locks/image.txt"
    few_packages = "".join(
        re.findall(
            r"^(?:sagemaker-training|pip)==.*\n(?:    .*\n)+", lock.read_text(), re.MULTILINE
        )
    )
    assert few_packages.count("==") == 2
    lock.write_text(few_packages)
    run = build(tag, source, **build_variables() | {"DOCKER_BUILDKIT": "0"})
    assert run.returncode == 0, run.stdout[-3000:]
    our_config = inspect(image)["Config"]
    legacy_config = inspect(tag)["Config"]
    same_keys = ("Entrypoint", "Cmd", "WorkingDir")
    assert {key: our_config[key] for key in same_keys} == {
        key: legacy_config[key] for key in same_keys
    }
    unversioned = [
        [line for line in config["Env"] if "VERSION" not in line and "REVISION" not in line]
        for config in (our_config, legacy_config)
    ]
    assert unversioned[0] == unversioned[1]
    assert "error: train takes no flags" in docker("run", "--rm", tag, "train", "--x").stdout


# At a terminal, and with others in the container --------------------------------------------------


WAITING_PROGRAM = """
import time
from collections.abc import Callable
from pathlib import Path
print("READY", flush=True)
while not Path("/tmp/go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def waiting_job_options(tmp_path: Path) -> tuple[str, ...]:
    """The options of a container whose job waits until /tmp/go is there."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text(WAITING_PROGRAM)
    (tmp_path / "hyperparameters.json").write_text('{"sagemaker_program": "train.py"}')
    hyperparameters_path = "/opt/ml/input/config/hyperparameters.json"
    return (
        *mount(tmp_path / "hyperparameters.json", hyperparameters_path, "ro"),
        *mount(tmp_path / "code", "/opt/ml/code", "ro"),
    )


def test_a_shell_at_a_terminal(image):
    """A shell has the environment, the window's size, Ctrl-C for its programs, and exit status."""
    terminal = Terminal(DOCKER, "run", "--rm", "-it", *sweeper.labels(), image, "bash")
    try:
        terminal.resize(40, 120)
        terminal.type('until [ "$(stty size)" = "40 120" ]; do sleep 0.1; done; echo SI""ZE\n')
        terminal.expect("SIZE")
        terminal.type('echo IN""=$CONDA_DEFAULT_ENV $(command -v python)\n')
        terminal.expect("IN=sagemaker-lightning /opt/conda/envs/sagemaker-lightning/bin/python")
        terminal.type(
            'python -c \'import time; print("SLE" + "EPS", flush=True); time.sleep(600)\'\n'
        )
        terminal.expect("SLEEPS")
        terminal.type("\x03")
        terminal.expect("KeyboardInterrupt")
        terminal.type('echo STA""TUS=$?\n')
        terminal.expect("STATUS=130")
        terminal.type("exit 7\n")
        assert terminal.wait() == 7
    finally:
        terminal.kill()


def test_training_at_a_terminal(image: str, waiting_job_options: tuple[str, ...]):
    """No command is given. Ctrl-C reaches the program."""
    terminal = Terminal(
        DOCKER, "run", "--rm", "-it", *sweeper.labels(), *waiting_job_options, image
    )
    try:
        terminal.expect("READY")
        terminal.type("\x03")
        terminal.expect("KeyboardInterrupt")
        assert terminal.wait() == 130
    finally:
        terminal.kill()


DEBUGGED_PROGRAM = """
import json, socket, sys
with socket.create_connection(("127.0.0.1", 5678)) as client:
    request = {"type": "request", "command": "initialize", "arguments": {"adapterID": "x"}}
    body = json.dumps(request | {"seq": 1})
    client.sendall(f"Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    received = b""
    while b"supportsConditionalBreakpoints" not in received:
        received += client.recv(65536)
print("DEBUGGER ANSWERS", flush=True)
sys.exit(3)
"""


def test_a_debugger_that_a_job_brings(container, tmp_path: Path):
    (tmp_path / "train.py").write_text(DEBUGGED_PROGRAM)
    options = (
        *mount(tmp_path, "/mine", "ro"),
        *mount(packages_of("debugpy").resolve(), "/debugpy", "ro"),
    )
    options += ("--env", "PYTHONPATH=/opt/sagemaker-lightning:/debugpy")
    command = ("python", "-m", "debugpy", "--listen", "127.0.0.1:5678", "/mine/train.py")
    run = container(*command, options=options, timeout=120)
    assert run.returncode == 3 and "DEBUGGER ANSWERS" in run.stdout, run.stdout


SESSION_PROGRAM = """
import os
from collections.abc import Callable
from pathlib import Path
from sagemaker_lightning.process.supervisor import MARK_VARIABLE
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    while os.getppid() != 1:
        pass
    Path("/tmp/orphan").write_text(str(os.getpid()))
    os.execvp("sleep", ["sleep", "600"])
while not Path("/tmp/orphan").exists() or not Path("/tmp/orphan").read_text():
    pass
marked = [f"{MARK_VARIABLE}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0")
          for pid in (1, Path("/tmp/orphan").read_text())]
print("MARKED", marked)
Path("/tmp/go").touch()
"""


def test_a_session_beside_the_job(image: str, waiting_job_options: tuple[str, ...]):
    """Processes that a session leaves behind become children of `train`.

    SageMaker's remote debugging starts such sessions.

    test_supervisor.py shows that `train` leaves alone what has not got its mark.
    """
    name = docker("run", "--detach", *waiting_job_options, image, "train").stdout.strip()
    try:
        while "READY" not in (output := docker("logs", name).stdout):
            assert docker("inspect", "--format", "{{.State.Running}}", name).stdout == "true\n", (
                output
            )
            time.sleep(0.1)
        assert (
            docker("exec", name, "python", "-c", SESSION_PROGRAM).stdout == "MARKED [True, False]\n"
        )
        assert docker("wait", name).stdout == "0\n", docker("logs", name).stdout
    finally:
        docker("rm", "--force", "--volumes", name)
