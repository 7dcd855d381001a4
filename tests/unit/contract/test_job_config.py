"""contract/job_config.py and launch/train_command.py: errors in input/config.

Each is one line that names the file.
"""

import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, Job
from sagemaker_training import environment, trainer

from sagemaker_lightning.contract import hyperparameters, job_config
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import train_command

HOST = {"current_host": "a", "hosts": ["a"]}
GROUP = {"instance_group_name": "g", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]}
DEEP = "[" * 100_000
LONG = [1] * 99
CUT = f"found {{}}{json.dumps(LONG)[:50]}{{}}; expected"
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
    "NUL in a list": ("hyperparameters.json", '{"a": ["x", "y\\u0000"]}', "it has a NUL in 'y"),
    "NUL in an object": ("hyperparameters.json", '{"a": {"b": "y\\u0000"}}', "it has a NUL in 'y"),
    "NUL in a name": ("hyperparameters.json", '{"a": {"y\\u0000": 1}}', "it has a NUL in 'y"),
    "a long number": (
        "hyperparameters.json",
        '{"a": 1' + "0" * 5000 + "}",
        "cannot be read (Exceeds the limit",
    ),
    "a name": ("hyperparameters.json", '{"a=b": "1"}', "found the name 'a=b'"),
    "an empty name": ("hyperparameters.json", '{"": "1"}', "found the name ''; expected"),
    "too long": (
        "hyperparameters.json",
        json.dumps({"a": "x" * 200_000}),
        "found 200009 characters",
    ),
    "a region": (
        "hyperparameters.json",
        '{"sagemaker_region": "5"}',
        "found sagemaker_region=5; expected a text",
    ),
    "a level": (
        "hyperparameters.json",
        '{"sagemaker_container_log_level": "loud"}',
        "expected DEBUG, INFO",
    ),
    "hosts": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": "abc"}',
        'found hosts "abc"; expected a list',
    ),
    "a number of hosts": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": 5}',
        "found hosts 5; expected",
    ),
    "one host twice": (
        "resourceconfig.json",
        '{"current_host": "a", "hosts": ["a", "a"]}',
        "expected each name",
    ),
    "no name": (
        "resourceconfig.json",
        '{"current_host": ["a"], "hosts": [["a"]]}',
        "expected a list of names",
    ),
    "an empty host": (
        "resourceconfig.json",
        '{"current_host": "", "hosts": [""]}',
        "expected a list of names",
    ),
    "another host": (
        "resourceconfig.json",
        '{"current_host": "b", "hosts": ["a"]}',
        "which is not among hosts",
    ),
    "no object": ("resourceconfig.json", "[]", "found []; expected a JSON object"),
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
    "a group that is a number": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": [5]}),
        "its instance_groups are",
    ),
    "a group without hosts": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": [GROUP | {"hosts": None}]}),
        "its instance_groups are",
    ),
    "a group with a number for a host": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": [GROUP | {"hosts": ["a", 5]}]}),
        "its instance_groups are",
    ),
    "a group whose name is a number": (
        "resourceconfig.json",
        json.dumps(HOST | {"instance_groups": [GROUP | {"instance_group_name": 5}]}),
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
        "found 5 for channel x; expected a JSON object",
    ),
    "a channel elsewhere": ("inputdataconfig.json", '{"../x": {}}', "found the channel '../x'"),
    "the folder of all channels": ("inputdataconfig.json", '{"..": {}}', "found the channel '..'"),
    "a channel's long name": (
        "inputdataconfig.json",
        json.dumps({"x" * 65: {}}),
        "expected up to 64 letters",
    ),
    "an empty folder": ("checkpointconfig.json", '{"LocalPath": ""}', "JSON object with LocalPath"),
    "checkpoints": (
        "checkpointconfig.json",
        '{"LocalPath": 5}',
        "expected a JSON object with LocalPath",
    ),
    "no checkpoints": ("checkpointconfig.json", DEEP, "cannot be read (maximum recursion depth"),
    "a folder": ("checkpointconfig.json", None, "cannot be read (it is not a file)"),
    "nothing": ("inputdataconfig.json", "", "cannot be read (Expecting value"),
    # A long value is cut to 50 characters.
    "a long value": ("resourceconfig.json", json.dumps(LONG), CUT.format("", "")),
    "a long region": (
        "hyperparameters.json",
        json.dumps({"sagemaker_region": LONG}),
        CUT.format("sagemaker_region=", ""),
    ),
    "a long level": (
        "hyperparameters.json",
        json.dumps({"sagemaker_container_log_level": LONG}),
        CUT.format("sagemaker_container_log_level=", ""),
    ),
    "long hosts": (
        "resourceconfig.json",
        json.dumps({"current_host": "a", "hosts": LONG}),
        CUT.format("hosts ", ""),
    ),
    "hosts twice": (
        "resourceconfig.json",
        json.dumps({"current_host": "a", "hosts": ["a"] * 99}),
        f"found hosts {json.dumps(['a'] * 99)[:50]}; expected",
    ),
    "a long interface": (
        "resourceconfig.json",
        json.dumps(HOST | {"network_interface_name": LONG}),
        CUT.format("network_interface_name ", ""),
    ),
    "a long channel": (
        "inputdataconfig.json",
        json.dumps({"x": LONG}),
        CUT.format("", " for channel x"),
    ),
    "a long NUL": (
        "hyperparameters.json",
        json.dumps({"a": "x" * 50 + "y\0"}),
        f"it has a NUL in '{'x' * 50}')",
    ),
    "many bytes": (
        "inputdataconfig.json",
        " " * (2**24 + 1),
        "cannot be read (it has 16777217 bytes)",
    ),
}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """Give each test the variable that train_command sets."""
    monkeypatch.setenv("SAGEMAKER_TRAINING_MODULE", "")


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
    resources = {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "current_group_name": "g",
        "instance_groups": [GROUP],
    }
    files = {
        "hyperparameters": {
            "sagemaker_program": '"train.py"',
            "sagemaker_container_log_level": "20",
            "sagemaker_region": "null",
            "lr": "1e-3",
        },
        "resourceconfig": resources
        | {"network_interface_name": "eth0", "current_instance_type": "ml.g5.xlarge"},
        "inputdataconfig": {
            "training": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"},
            "x" * 64: {},
        },
        "checkpointconfig": {"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/checkpoints"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    job_config.check(tmp_path)
    (tmp_path / "resourceconfig.json").unlink()
    with pytest.raises(UserError, match=r"resourceconfig.json: cannot be read \(it is not a fi"):
        job_config.check(tmp_path)


def test_files_may_be_as_large_as_what_is_allowed(tmp_path, monkeypatch):
    contents = {"hyperparameters": {"a": ""}, "resourceconfig": HOST, "inputdataconfig": {}}
    rest = 100_000 - sum(len(json.dumps(content)) for content in contents.values())
    for added in (0, 1):
        contents["hyperparameters"] = {"a": "x" * (rest + added)}
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        if not added:
            job_config.check(tmp_path)
    with pytest.raises(UserError, match=r"hyperparameters.json: found \d+ .* may have 100000, as"):
        job_config.check(tmp_path)
    monkeypatch.setattr(job_config, "MAX_FILE_BYTES", 10)
    (tmp_path / "x.json").write_text('{"a": 123}')
    assert job_config.read(tmp_path / "x.json") == {"a": 123}
    (tmp_path / "x.json").write_text('{"a": 1234}')
    with pytest.raises(UserError, match=r"x.json: cannot be read \(it has 11 bytes\)"):
        job_config.read(tmp_path / "x.json")


def test_the_check_is_a_program_that_needs_nothing_installed(tmp_path):
    """entrypoint.sh runs it; the package is not on Python's path."""
    command = [sys.executable, "-I", "-S", str(ROOT / "sagemaker_lightning/contract/job_config.py")]
    folder = tmp_path / "a\nb"
    folder.mkdir()
    (folder / "hyperparameters.json").write_text("{}")
    (folder / "resourceconfig.json").write_text(json.dumps(HOST))
    for content, output, status in (
        ("{}", "", 0),
        ("[]", f"{tmp_path}/a b/inputdataconfig.json: found []; expected a JSON object\n", 1),
    ):
        (folder / "inputdataconfig.json").write_text(content)
        run = subprocess.run([*command, str(folder)], capture_output=True, text=True)
        assert (run.stdout, run.returncode) == (output, status), run.stderr


def test_a_text_that_is_nested_too_deeply_is_a_text():
    assert hyperparameters.text(DEEP) == DEEP


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
    assert lines[0] == "error: the training toolkit failed (OSError: x)"
    assert lines[-1] == "OSError: x"
    assert capsys.readouterr().err.splitlines()[-1] == lines[0]


def test_a_framework_error_is_cut_at_its_limit(tmp_path, monkeypatch):
    """The failure file is read-only when its line is written; the log has the line before."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output/failure").write_text(f"Framework Error: \n{'x' * 501}\n")

    def refuse(*_, **options) -> None:
        assert (tmp_path / "log").read_text().startswith("error: the training toolkit failed (")
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "Environment", lambda: None)
    monkeypatch.setattr(trainer, "train", lambda: None)
    monkeypatch.setattr(train_command.failures, "write", refuse)
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        train_command.main()
        assert (tmp_path / "log").read_text().splitlines() == [
            f"error: the training toolkit failed ({'x' * 500})",
            f"error: {tmp_path}/output/failure could not be written: Read-only file system",
        ]


def test_the_toolkit_is_not_started_with_what_it_cannot_use(tmp_path, monkeypatch, capsys):
    def refuse() -> None:
        raise TypeError("x" * 600)

    (tmp_path / "output").mkdir()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "Environment", refuse)
    monkeypatch.setattr(trainer, "train", lambda: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as left:
        train_command.main()
    line = (
        f"error: {tmp_path}/input/config: the training toolkit cannot use what is there "
        f"(TypeError: {'x' * 489}); correct it"
    )
    assert left.value.code == 1 and (tmp_path / "output/failure").read_text() == line
    assert capsys.readouterr().err == f"{line}\n"


def test_the_command_of_the_entry_point_starts_the_toolkit(tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "Environment", lambda: started.append("its environment"))
    monkeypatch.setattr(trainer, "train", lambda: started.append("the toolkit"))
    monkeypatch.delitem(sys.modules, train_command.__name__)  # as for a new process
    runpy.run_module(train_command.__name__, run_name="__main__")
    assert started == ["its environment", "the toolkit"]


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
