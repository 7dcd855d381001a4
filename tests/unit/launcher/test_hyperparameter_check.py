"""launcher/hyperparameter_check.py: what an application answers when it is asked for its flags."""

import subprocess

import pytest

from sagemaker_lightning.launcher import (
    hyperparameter_check,
)

DOCKERS = "docker: no such image\n\nRun 'docker run --help' for more information\n"


@pytest.fixture
def ended(monkeypatch):
    """Return a function that has the application end with a status and errors."""

    def end(status: int, errors: str) -> None:
        completed = subprocess.CompletedProcess([], status, "", errors)
        monkeypatch.setattr(hyperparameter_check.subprocess, "run", lambda *_, **__: completed)

    return end


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        (DOCKERS, "docker: no such image"),
        ("first\nlast\n", "last"),
        ("", "exit status 125"),
    ],
)
def test_a_check_that_could_not_be_made_is_reported(ended, errors, says):
    ended(125, errors)
    assert hyperparameter_check.ask(["python"], {}, {}) == [f"the hyperparameters: {says}"]


def test_a_program_that_does_not_start_is_reported():
    (told,) = hyperparameter_check.ask(["/no/such/program"], {}, {})
    assert told.startswith("the hyperparameters: ") and "/no/such/program" in told


def test_hyperparameters_that_the_application_takes_are_right(ended):
    ended(0, "warning: something else\n")
    assert hyperparameter_check.ask(["python"], {}, {}) == []


def test_a_hyperparameter_that_the_application_refuses_is_an_error(ended):
    ended(1, "warning: something else\nerror: --a: found 1\n")
    with pytest.raises(ValueError, match=r"refuses a hyperparameter: --a: found 1$"):
        hyperparameter_check.ask(["python"], {}, {})


def test_the_parser_that_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(
        hyperparameter_check, "ask", lambda command, *_: asked.append(command) or ["asked"]
    )
    request = {"HyperParameters": {"sagemaker_program": "mine.py"}}
    assert hyperparameter_check.check(request, "no") == [
        "the hyperparameters, as --check-hyperparameters=no says"
    ]
    own = ["the hyperparameters: they are for a program of the job's own, mine.py"]
    assert hyperparameter_check.check(request, "local") == own
    request = {"Environment": {"SAGEMAKER_PROGRAM": "mine.py"}}
    assert hyperparameter_check.check(request, "image") == own and not asked
    for program in sorted(hyperparameter_check.LAUNCHERS):
        request = {"Environment": {"SAGEMAKER_PROGRAM": program}}
        assert hyperparameter_check.check(request, "local") == ["asked"]
    monkeypatch.setattr(hyperparameter_check, "find_spec", lambda name: None)
    monkeypatch.setattr(hyperparameter_check, "ROOT", hyperparameter_check.ROOT / "none")
    assert "lacks the application's packages" in hyperparameter_check.check(request, "local")[0]


def test_the_channels_decide_what_the_parser_expects():
    request = {"InputDataConfig": [{"ChannelName": "My-Data"}]}
    assert hyperparameter_check.channel_variables({}) == {}
    assert hyperparameter_check.channel_variables(request) == {
        "SM_CHANNELS": '["My-Data"]', "SM_CHANNEL_MY-DATA": "/opt/ml/input/data/My-Data"
    }  # fmt: skip
