"""contract/restart.py: what is known of a restart, and what model.json has of it."""

import re
import time
from types import SimpleNamespace

import pytest

from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.resume import container_restarts
from sagemaker_lightning.resume.container_restarts import ContainerRestarts


@pytest.mark.parametrize(
    ("step", "resumed_step", "lost"),
    [(17, 12, 5), (17, 17, 0), (17, 18, 0), (None, 0, None), (17, None, None)],
)
def test_how_many_steps_were_lost(step, resumed_step, lost):
    restart = ContainerRestart("a fault", step, 10.0, resumed_step)
    assert restart.lost_steps == lost


def test_what_model_json_has_of_a_restart():
    fields = {"why": "a fault", "step": 17, "at": 10.0}
    restart = ContainerRestart.read(fields)
    expected = {"reason": "a fault", "step": 17}
    unknown = dict.fromkeys(("resumed_step", "lost_steps", "seconds"))
    assert restart.described() == expected | unknown
    known = {"resumed_step": 12, "lost_steps": 5, "seconds": 2.35}
    assert restart.continued(12, at=12.3456).described() == expected | known


@pytest.mark.parametrize(
    ("step", "is_first", "says"),
    [
        (17, True, r"restart 1: continued from step 12 after \d\.\d s, 5 steps lost\n"),
        (None, True, r"restart 1: continued from step 12 after \d\.\d s\n"),
        (17, False, ""),
    ],
)
def test_what_a_restart_has_cost_is_said_once(capsys, step, is_first, says, monkeypatch):
    """By resume/container_restarts.py, as soon as a batch is done."""
    restart = ContainerRestart("a fault", step, time.monotonic() - 2)
    restarts = ContainerRestarts(SimpleNamespace(restarts=(restart,), watch=None))
    trainer = SimpleNamespace(step=12, is_global_zero=is_first)
    monkeypatch.setattr(container_restarts, "steps_done", lambda trainer: trainer.step)
    restarts.training_begins(trainer)
    assert restarts.all() == [restart]
    for trainer.step in (13, 14):
        restarts.batch_ended(trainer)
    assert re.fullmatch(says, capsys.readouterr().out)
    (newest,) = restarts.all()
    assert newest.resumed_step == 12 and newest.seconds >= 2


def test_a_training_without_a_restart_says_nothing_of_one(capsys, monkeypatch):
    restarts = ContainerRestarts(SimpleNamespace(restarts=(), watch=None))
    trainer = SimpleNamespace(is_global_zero=True)
    monkeypatch.setattr(container_restarts, "steps_done", lambda trainer: 0)
    restarts.training_begins(trainer)
    restarts.batch_ended(trainer)
    assert restarts.all() == [] and capsys.readouterr().out == ""
