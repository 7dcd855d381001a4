"""A run ends with one line on the mistake, none on its effects, and where the logs are."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Job

from sagemaker_lightning.cli import export, run


@pytest.mark.slow
@pytest.mark.parametrize("program", ["app/train_multi_node.py", "app/train_torchrun.py"])
def test_a_mistake_of_two_ranks_is_not_followed_by_how_they_were_ended(job: Job, program):
    job.write("input/data/training/data_batch_1", "<html>")
    job.write(
        "input/config/hyperparameters.json",
        '{"trainer.devices": "2", "trainer.accelerator": "cpu"}',
    )
    run = job.run(SAGEMAKER_PROGRAM=program)
    assert (
        run.returncode == 1
        and "data_batch_1 is not a CIFAR-10 batch" in job.failure.splitlines()[0]
    )
    text_after = run.stdout.partition("error: ")[2]
    assert "killed by SIGTERM" not in text_after and "SignalException" not in text_after, text_after


@pytest.mark.parametrize(
    ("save_dir", "text"),
    [
        ("/b/tensorboard/algo-1", "/b/tensorboard"),
        ("s3://b/logs", "s3://b/logs"),
        ("/c", "/c"),
        (None, "/b/tensorboard"),
    ],
)
def test_where_the_logs_are(save_dir, text):
    cli = SimpleNamespace(
        trainer=SimpleNamespace(logger=SimpleNamespace(save_dir=save_dir) if save_dir else None)
    )
    assert export.logs(cli, SimpleNamespace(log_dir=Path("/b/tensorboard/algo-1"))) == text


def test_that_fitting_stopped_is_said_once(monkeypatch):
    monkeypatch.setattr(run.say_once, "lines_before", set())
    texts = ["`Trainer.fit` stopped: `max_epochs=1` reached."] * 2 + ["another line"] * 2
    records = [logging.LogRecord("x", logging.INFO, "", 0, text, None, None) for text in texts]
    assert [run.say_once(record) for record in records] == [True, False, True, True]
