"""A stranger's script in a stranger's image, under both SDKs, in the rehearsal.

The stranger's image has Python, torch, Lightning, AWS's toolkit, and our wheel by pip. It stands on
the layers of our image, so that torch is not installed twice, but has none of our code, entry
point, variables and start of Python. Its entry point is a shell script that starts the command and
waits for it, as many images have.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from containers import IMAGE_TAG, ROOT, docker
from rehearsals import ROLE, Rehearsal
from test_container import SAVING_PROGRAM, mount, stopped
from test_package import wheel  # noqa: F401  (a fixture)
from test_rehearsal_clients import Person

# In our image: test_clients_sdk2.py and test_clients_sdk3.py. Without one:
# test_package.py and test_process_left_as_it_was.py.
pytestmark = [pytest.mark.docker, pytest.mark.thorough]

SOURCE = str(ROOT / "tests/clients/stranger")
STEPS = 40
STEP_SECONDS = 0.5  # seconds of a step: the rest of the training takes longer than GRACE_SECONDS
GRACE_SECONDS = 10
BASH_ENV = (
    "/opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages/sagemaker_lightning/launch/"
    "bash_env.sh"
)
KILLED_AT_STEP = 12
DOCKERFILE = """
FROM {image}
RUN rm -rf /opt/sagemaker-lightning \
    /opt/conda/envs/*/lib/python3.*/site-packages/sagemaker-lightning.pth
ENV SAGEMAKER_PROGRAM= SAGEMAKER_TRAINING_MODULE= PYTHONPATH= BASH_ENV= \
    PIP_CONSTRAINT= UV_CONSTRAINT= \
    SAGEMAKER_LIGHTNING_VERSION= SAGEMAKER_LIGHTNING_REVISION= OMP_NUM_THREADS=1
WORKDIR /
RUN ! python -c "import sagemaker_lightning" 2>/dev/null
COPY {wheel} start.sh /
RUN pip install --quiet --no-index /{wheel}
ENTRYPOINT ["bash", "-m", "/start.sh"]
"""


@pytest.fixture(scope="module")
def foreign_image(image, wheel, tmp_path_factory):  # noqa: F811
    """Somebody else's image."""
    folder = tmp_path_factory.mktemp("foreign")
    tag = f"{IMAGE_TAG.replace(':', '-')}-of-somebody-else"
    (folder / wheel.name).write_bytes(wheel.read_bytes())
    (folder / "start.sh").write_text('#!/bin/bash\n"$@"\n')
    (folder / "Dockerfile").write_text(DOCKERFILE.format(image=image, wheel=wheel.name))
    build = docker("build", "--quiet", f"--tag={tag}", str(folder))
    assert build.returncode == 0, build.stdout
    yield tag
    docker("image", "rm", tag)


# As AWS's PyTorch images are laid out (aws/deep-learning-containers, start_with_right_hostname.sh).
AWS_DOCKERFILE = """
FROM {foreign_image}
COPY start_with_right_hostname.sh /usr/local/bin/
ENV SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main {line}
ENTRYPOINT {entry_point}
"""
AWS_START = """#!/usr/bin/env bash
if [[ "$1" = "train" ]]; then
    train
else
    eval "$@"
fi
"""
AWS_ENTRY_POINT = '["bash", "-m", "start_with_right_hostname.sh"]'
LINES = {
    "BASH_ENV": (f"BASH_ENV={BASH_ENV}", AWS_ENTRY_POINT),
    "entry point": ("", '["python3", "-m", "sagemaker_lightning.launch.train_command"]'),
}


@pytest.mark.parametrize(("line", "entry_point"), LINES.values(), ids=LINES)
def test_one_line_in_an_image_laid_out_as_awss(foreign_image, tmp_path, line, entry_point):
    """`train` hears SIGTERM, and the program has its time to save."""
    (tmp_path / "start_with_right_hostname.sh").write_text(AWS_START)
    (tmp_path / "start_with_right_hostname.sh").chmod(0o755)
    text = AWS_DOCKERFILE.format(foreign_image=foreign_image, line=line, entry_point=entry_point)
    (tmp_path / "Dockerfile").write_text(text)
    tag = f"{foreign_image}-as-awss"
    build = docker("build", "--quiet", f"--tag={tag}", str(tmp_path))
    assert build.returncode == 0, build.stdout
    files = {
        "code/saver.py": SAVING_PROGRAM,
        "config/hyperparameters.json": '{"sagemaker_program": "saver.py"}',
        "config/resourceconfig.json": '{"current_host": "algo-1", "hosts": ["algo-1"]}',
        "config/inputdataconfig.json": "{}",
        "output/data/.keep": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    mounts = mount(tmp_path / "code", "/opt/ml/code")
    mounts += mount(tmp_path / "config", "/opt/ml/input/config")
    mounts += mount(tmp_path / "output", "/opt/ml/output")
    try:
        printed, status = stopped(tmp_path / "output", *mounts, tag, "train")
        assert "SAVED" in printed and "saver.py: ended with exit status 0 after SIGTERM" in printed
        assert status == 0
        if line:  # other commands are as before
            run = docker("run", "--rm", tag, "echo", "train", "$$")
            assert "train 1" in run.stdout.splitlines()
    finally:
        docker("image", "rm", tag)


@pytest.fixture(scope="module")
def trained_line(foreign_image) -> str:
    """The line that the script prints at the end of an uninterrupted training."""
    run = docker(
        "run", "--rm", f"--volume={SOURCE}:/script", foreign_image, "python", "/script/train.py"
    )
    assert "resuming" not in run.stdout
    return re.search(r"TRAINED \w{64}", run.stdout)[0]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal that interrupts spot jobs, with a SIGTERM before."""
    rule = f"--interrupt=at step {KILLED_AT_STEP} warned"
    with Rehearsal(
        tmp_path_factory.mktemp("rehearsal"), rule, f"--grace={GRACE_SECONDS}", "--sync-every=0.2"
    ) as server:
        yield server


def job_log(rehearsal: Rehearsal, name: str) -> str:
    """Return the log lines of all attempts of a job."""
    return "\n".join(rehearsal.lines(name)["algo-1"])


def stop_then_kill(
    rehearsal: Rehearsal, person: Person, script: str, jobs: list[dict], trained_line: str
) -> None:
    """Stop the first job, and let the rehearsal interrupt the second one.

    SIGTERM reaches the first job's program. It does not reach the second one's, which is killed,
    trains to its end in another attempt, and then fails.
    """

    def job_name_with(prefix: str) -> str:
        summaries = rehearsal.sagemaker.list_training_jobs(NameContains=prefix)[
            "TrainingJobSummaries"
        ]
        return summaries[0]["TrainingJobName"] if summaries else ""

    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(person.run, script, jobs)
        while not (hearing_job := job_name_with(f"{person.sdk}-hearing")):
            assert not client.done(), client.result().stdout
        rehearsal.wait_for_line(hearing_job, "step=2 ")
        rehearsal.sagemaker.stop_training_job(TrainingJobName=hearing_job)
        output = client.result().stdout
    assert rehearsal.describe(hearing_job)["TrainingJobStatus"] == "Stopped", output
    hearing_log = job_log(rehearsal, hearing_job)
    assert "SIGTERM does not reach" not in hearing_log
    stopped_step = int(re.search(r"interrupted, resume from step (\d+): ", hearing_log)[1])
    assert stopped_step == int(re.findall(r"^step=(\d+) ", hearing_log, re.MULTILINE)[-1]) + 1

    deaf_job = job_name_with(f"{person.sdk}-deaf")
    deaf_log = job_log(rehearsal, deaf_job)
    warning = (
        "warning: SIGTERM does not reach this training: bash, the container's first process, "
        "does not pass it on."
    )
    assert deaf_log.count(warning) == 2 and "interrupted, resume" not in deaf_log
    first_step, second_step = (
        int(step) for step in re.findall(r"resuming from step (\d+)", deaf_log)
    )
    assert first_step == stopped_step
    assert KILLED_AT_STEP < second_step < STEPS  # it trained and saved after the signal, too
    assert trained_line in deaf_log
    description = rehearsal.describe(deaf_job)
    assert description["TrainingJobStatus"] == "Failed"
    reason = description["FailureReason"].removeprefix("AlgorithmError: ")
    assert reason.startswith(
        "error: import failed: put what is missing into the job's source, or name it in the "
    )
    assert (
        "(ModuleNotFoundError: No module named 'onnxruntime') [host algo-1, "
        in reason.splitlines()[0]
    )


def test_sdk_3_trains_in_a_foreign_image(rehearsal, foreign_image, trained_line, tmp_path):
    """The SDK's shell script is the entry point. One line of our package takes its place."""
    common_arguments = {
        "training_image": foreign_image,
        "role": ROLE,
        "output": "s3://rehearsal/output",
        "checkpoints": "s3://rehearsal/checkpoints/sdk3",
    }
    compute = {"instance_type": "ml.m5.xlarge", "instance_count": 1}
    script = {"entry_script": "train.py", "source_dir": SOURCE}
    jobs = [
        common_arguments
        | {"base_job_name": "sdk3-hearing", "compute": compute, "source_code": script}
        | {"hyperparameters": {"pause": STEP_SECONDS}, "environment": {"BASH_ENV": BASH_ENV}}
        | {"stopping": {"max_runtime_in_seconds": 600}},
        common_arguments
        | {
            "base_job_name": "sdk3-deaf",
            "compute": compute | {"enable_managed_spot_training": True},
        }
        | {"source_code": script}
        | {"hyperparameters": {"pause": STEP_SECONDS, "export": "onnx"}}
        | {"stopping": {"max_runtime_in_seconds": 600, "max_wait_time_in_seconds": 900}},
    ]
    stop_then_kill(
        rehearsal, Person("sdk3", tmp_path, rehearsal), "sdk3_session.py", jobs, trained_line
    )
