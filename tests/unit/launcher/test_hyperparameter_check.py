"""launcher/hyperparameter_check.py: what an application answers when it is asked for its flags."""

import subprocess

import pytest

from sagemaker_lightning.launcher import hyperparameter_check

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
