"""A run ends with one line on the mistake, none on its effects, and where the logs are."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Job
from jsonargparse import Namespace

from sagemaker_lightning.cli import export, run
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.shutdown import Interrupted


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


def resumed(*verdicts: bool | None) -> SimpleNamespace:
    """Return a stand-in of a run that was resumed with these verdicts."""
    return SimpleNamespace(
        resumes=[
            {"identical": verdict, "step": step, "said": f"the loss of {step} differs; more"}
            for step, verdict in enumerate(verdicts)
        ]
    )


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ([], ""),
        ([resumed()], ""),
        ([resumed(True, None)], ""),
        ([resumed(True, False, False)], "resumed at step 1: the loss of 1 differs"),
    ],
)
def test_a_failed_run_says_whether_it_had_continued_as_before(runs, line):
    assert run.went_otherwise(runs) == line


def test_a_program_that_leaves_with_status_0_is_wrong_and_others_are_not():
    def why(leaving: SystemExit) -> str:
        return f"it left with {leaving.code!r}"

    for status in (0, None):
        with (
            pytest.raises(UserError, match=f"^it left with {status}$"),
            run.wrong_if_it_leaves(why),
        ):
            sys.exit(status)
        with pytest.raises(SystemExit), run.wrong_if_it_leaves(None):
            sys.exit(status)
    for leaving in (SystemExit(3), SystemExit("text"), Interrupted(0)):
        with pytest.raises(SystemExit) as raised, run.wrong_if_it_leaves(why):
            raise leaving
        assert raised.value is leaving


def test_the_folders_of_all_loggers_are_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = Namespace(
        checkpoint=Namespace(dirpath=None),
        resume=Namespace(dirpath="s3://bucket/c"),
        logger=Namespace(save_dir="logs"),
        trainer=Namespace(),
    )
    first, second, third = (
        Namespace(class_path="x", init_args=Namespace(save_dir=folder))
        for folder in ("mine", "/kept", None)
    )
    environment = SageMakerEnvironment()
    for loggers, folders in (
        ([first, second, third, Namespace(class_path="y")], ["logger.save_dir=logs", "mine"]),
        (first, ["logger.save_dir=logs", "mine"]),
        (True, ["logger.save_dir=logs"]),
        (None, ["logger.save_dir=logs"]),
    ):
        config.trainer.logger = loggers
        run.warn_of_lost_folders(config, environment)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[1].removeprefix("--") for line in lines] == [
            folder.replace("mine", "trainer.logger.save_dir=mine") for folder in folders
        ]
