"""contract/job_config.py and launch/train_command.py: errors in input/config.

Each is one line that names the file.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, Job
from sagemaker_training import environment, trainer

from sagemaker_lightning.contract import hyperparameters, job_config
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import train_command

HOST = {"current_host": "a", "hosts": ["a"]}
DEEP = "[" * 100_000
BROKEN = {
    "depth": ("hyperparameters.json", '{"a": ' + DEEP, "cannot be read (maximum recursion depth"),
    "depth in a text": (
        "hyperparameters.json",
        json.dumps({"a": DEEP}),
        "a is a list or object that is nested",
    ),
    "not UTF-8": (
        "hyperparameters.json",
        b'{"a": "\xff"}',
        "cannot be read ('utf-8' codec can't decode",
    ),
    "half a character": ("hyperparameters.json", '{"a": "\\ud800"}', "surrogates not allowed"),
    "NUL": ("hyperparameters.json", '{"a": "x\\u0000"}', "it has a NUL"),
    "NUL in JSON": (
        "hyperparameters.json",
        json.dumps({"a": '"x\\u0000"'}),
        "a cannot be an argument: it has a NUL",
    ),
    "half a character in JSON": (
        "hyperparameters.json",
        json.dumps({"a": '"\\ud800"'}),
        "a cannot be an argument: ",
    ),
    "a long number": (
        "hyperparameters.json",
        '{"a": 1' + "0" * 5000 + "}",
        "cannot be read (Exceeds the limit",
    ),
    "a name": ("hyperparameters.json", '{"a=b": "1"}', "found the name 'a=b'"),
    "too long": (
        "hyperparameters.json",
        json.dumps({"a": "x" * 200_000}),
        "found 200009 characters",
    ),
    "a region": (
        "hyperparameters.json",
        '{"sagemaker_region": "5"}',
        "found sagemaker_region=5; allowed is a text",
    ),
    "a level": (
        "hyperparameters.json",
        '{"sagemaker_container_log_level": "loud"}',
        "allowed are DEBUG, INFO",
    ),
    "hosts": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": "abc"}',
        'found hosts "abc"; allowed is a list',
    ),
    "a number of hosts": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": 5}',
        "found hosts 5; allowed is",
    ),
    "one host twice": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": ["a", "a"]}',
        "allowed is each name",
    ),
    "no name": (
        "resourceconfig.json",
        '{"current_host": ["a"], "hosts": [["a"]]}',
        "allowed is a list of names",
    ),
    "groups": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": 5}),
        "its instance_groups are wrong",
    ),
    "a group": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": [{"x": 1}]}),
        "its instance_groups are",
    ),
    "an interface": (
        "resourceconfig.json",
        json.dumps(HOST | {"network_interface_name": 7}),
        "found network_",
    ),
    "a channel": (
        "inputdataconfig.json",
        '{"x": 5}',
        "found 5 for channel x; allowed is a JSON object",
    ),
    "a channel elsewhere": ("inputdataconfig.json", '{"../x": {}}', "found the channel '../x'"),
    "checkpoints": (
        "checkpointconfig.json",
        '{"LocalPath": 5}',
        "allowed is a JSON object with LocalPath",
    ),
    "no checkpoints": ("checkpointconfig.json", DEEP, "cannot be read (maximum recursion depth"),
    "a folder": ("checkpointconfig.json", None, "cannot be read (it is no file)"),
    "nothing": ("inputdataconfig.json", "", "cannot be read (Expecting value"),
    "many bytes": (
        "inputdataconfig.json",
        " " * (2**24 + 1),
        "cannot be read (it has 16777217 bytes)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_wrong_is_named(tmp_path, case):
    name, text, says = BROKEN[case]
    for good, content in (
        ("hyperparameters.json", {}),
        ("resourceconfig.json", HOST),
        ("inputdataconfig.json", {}),
    ):
        (tmp_path / good).write_text(json.dumps(content))
    job_config.check(tmp_path)
    path = tmp_path / name
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:  # noqa: PT011
        job_config.check(tmp_path)
    assert str(error.value).startswith(f"{path}: ") and says in str(error.value)


def test_what_sagemaker_writes_is_right(tmp_path):
    group = {"instance_group_name": "g", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]}
    resources = {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "current_group_name": "g",
        "instance_groups": [group],
    }
    files = {
        "hyperparameters": {
            "sagemaker_program": '"train.py"',
            "sagemaker_container_log_level": "20",
            "lr": "1e-3",
        },
        "resourceconfig": resources
        | {"network_interface_name": "eth0", "current_instance_type": "ml.g5.xlarge"},
        "inputdataconfig": {
            "training": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
        },
        "checkpointconfig": {"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/checkpoints"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    job_config.check(tmp_path)


def test_a_text_that_is_nested_too_deeply_is_a_text():
    assert hyperparameters.text(DEEP) == DEEP


@pytest.mark.slow
def test_what_the_toolkit_cannot_use_is_one_line_and_no_framework_error(job: Job):
    """A fault that nobody looks for; here a hyperparameter of the SDK's."""
    groups = [{"instance_group_name": "g", "instance_type": "x", "hosts": ["a"]}]
    job.write("input/config/hyperparameters.json", '{"sagemaker_distribution_instance_groups": 5}')
    job.write("input/config/resourceconfig.json", json.dumps(HOST | {"instance_groups": groups}))
    run = job.run()
    assert run.returncode == 1 and "Traceback" not in run.stdout
    assert job.failure.startswith(
        f"error: {job.base}/input/config: the training toolkit cannot use what is there (Type"
    )
    assert run.stdout.splitlines()[-1] == job.failure


def test_a_framework_error_gets_a_first_line(tmp_path, monkeypatch, capsys):
    """This is for all that the toolkit raises outside of launch/toolkit_hook.py."""

    def train():
        (tmp_path / "output/failure").write_text(
            "Framework Error: \nTraceback (most recent call last):\nOSError: x\n"
        )
        sys.exit(1)

    (tmp_path / "output").mkdir()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "Environment", lambda: None)
    monkeypatch.setattr(trainer, "train", train)
    with pytest.raises(SystemExit):
        train_command.main()
    lines = (tmp_path / "output/failure").read_text().splitlines()
    assert (
        lines[0] == "error: the training toolkit failed (OSError: x)" and lines[-1] == "OSError: x"
    )
    assert capsys.readouterr().err.splitlines()[-1] == lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_a_user_without_a_name_or_a_home(job: Job):
    """As with `docker run --user=54321`.

    Only the entry point runs: this user may not be allowed to run Python.
    """
    script = (ROOT / "entrypoint.sh").read_text()
    command = [
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
        "bash",
        "-c",
        script,
        "entrypoint.sh",
    ]
    command += ["bash", "-c", 'touch "$HOME/x" && rm -r "$HOME" && echo "$USER $TMPDIR"']
    variables = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "TMPDIR": "/nowhere"}
    completed = subprocess.run(command, env=variables, capture_output=True, text=True, cwd="/")
    assert completed.returncode == 0 and completed.stdout == "54321 /tmp\n", completed.stderr
