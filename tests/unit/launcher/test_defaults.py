"""Flags from a file, which the command line's own come before."""

import pytest

from sagemaker_lightning.launcher import command, defaults, job_request

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1"
NEEDED = f"""
image = "{IMAGE}"
role = "arn:aws:iam::123456789012:role/x"
output = "s3://bucket/o"
"""


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file of defaults, and returns the flag that names it."""

    def write(text: str) -> str:
        (tmp_path / "job.toml").write_text(text)
        return f"--defaults={tmp_path / 'job.toml'}"

    return write


def test_flags_come_from_a_file(file):
    text = """
    max-run = "12h"
    volume-size = 50
    spot = true
    drill = false
    subnet = ["subnet-1", "subnet-2"]
    channel.training = "s3://bucket/data/,mode=FastFile"
    tag = ["team=vision"]
    [env]
    NCCL_DEBUG = "INFO"
    [hyperparameters]
    trainer.max_epochs = 20
    trainer.strategy = "ddp"
    "optimizer.lr" = 0.5
    data.shuffle = true
    """
    args = command.parse([file(NEEDED + text)])
    assert (args.image, args.max_run, args.volume_size) == (IMAGE, 43200, 50)
    assert args.spot is True and args.drill is False
    assert args.subnet == ["subnet-1", "subnet-2"]
    assert args.channel == ["training=s3://bucket/data/,mode=FastFile"]
    assert (args.tag, args.env) == (["team=vision"], ["NCCL_DEBUG=INFO"])
    assert args.hyperparameters == [
        "trainer.max_epochs=20",
        "trainer.strategy=ddp",
        "optimizer.lr=0.5",
        "data.shuffle=true",
    ]
    assert args.poll == 10  # what nobody gives is as without a file


def test_the_command_line_comes_before_the_file(file):
    text = """
    spot = true
    poll = 3
    instance-type = "ml.m5.large"
    subnet = ["subnet-1"]
    tag = { team = "vision", run = 1 }
    hyperparameters = { a = 1, b = 2 }
    """
    flags = ["--no-spot", "--poll=10", "--subnet=subnet-9", "--tag=run=2", "b=3", "--tag=x=y"]
    args = command.parse([file(NEEDED + text), *flags])
    assert (args.spot, args.poll, args.instance_type) == (False, 10, "ml.m5.large")
    assert args.subnet == ["subnet-9"]
    assert args.tag == ["team=vision", "run=2", "x=y"]
    assert args.hyperparameters == ["a=1", "b=3"]


def test_a_variable_is_still_taken_from_the_environment(file, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    args = command.parse([file(NEEDED + 'env = ["A_SECRET", "B=1"]'), "--env=B=2"])
    assert job_request.variables(args.env) == {"A_SECRET": "x", "B": "2"}
    assert job_request.taken_variables(args) == {"A_SECRET"}


def test_what_is_needed_may_be_in_either(file, capsys):
    args = command.parse([file(NEEDED), "--role=other"])
    assert (args.image, args.role) == (IMAGE, "other")
    with pytest.raises(SystemExit) as caught:
        command.parse([file('image = "x"'), "--role=y"])
    assert caught.value.code == 2
    line = "error: the following arguments are required: --output; --help lists all flags\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "max_run = 1",
            "found 'max_run' in .*, expected hyperparameters or a fl.*, such as max-ru",
        ),
        ("xyz = 1", "expected hyperparameters or a flag of --help without its dashes$"),
        ('defaults = "other.toml"', "found 'defaults' in "),
        ("help = true", "found 'help' in "),
        ('spot = "yes"', "spot in .*: found 'yes', expected true or false"),
        ("max-run = true", "max-run in .*: found True, expected text or a number"),
        ("max-run = [1]", r"max-run in .*: found \[1\], expected text or a number"),
        ("tag = 'a=b'", "tag in .*: found 'a=b', expected a list, or a table of KEY = VALUE"),
        ("tag = { a = { b = 1 } }", "tag in .*: found {'b': 1}, expected text or a number"),
        ("hyperparameters = 3", "hyperparameters in .*: found 3, expected a table"),
        ("hyperparameters = { a = [1] }", r"hyperparameters in .*: found \[1\], expected text"),
        ("max-run = 1\nmax-run = 2", "cannot be read: Cannot overwrite a value"),
        ("max-run", "cannot be read: Expected '=' after a key"),
        ("x = " + "[" * 5000, "cannot be read: "),
    ],
)
def test_a_mistake_in_the_file(file, text, says):
    with pytest.raises(ValueError, match=f"^--defaults: .*{says}") as caught:
        command.parse([file(text)])
    assert "\n" not in str(caught.value)


def test_a_value_that_a_flag_does_not_take_names_the_file(file, capsys):
    flag = file(NEEDED + 'max-run = "soon"')
    with pytest.raises(SystemExit):
        command.parse([flag])
    error = capsys.readouterr().err
    path = flag.removeprefix("--defaults=")
    assert error.startswith(f"error: {path}: argument --max-run: found 'soon', expected a whole n")
    assert error.count("\n") == 1


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="--defaults: .*none.toml cannot be read: .*No such file"):
        command.parse([f"--defaults={tmp_path / 'none.toml'}"])


def test_what_replaces_what():
    assert defaults.over("env", ["A=1", "B=2", "C"], ["C=3", "A=4"]) == ["B=2", "C=3", "A=4"]
    assert defaults.over("subnet", ["a"], []) == ["a"]
    assert defaults.over("subnet", ["a"], ["b"]) == ["b"]
