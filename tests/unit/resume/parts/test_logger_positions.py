"""Logs are continued where the checkpoint is."""

from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.resume.parts.logger_positions import LoggerPositions
from sagemaker_lightning.resume.parts.part import Moment


def test_logs_are_continued_once_on_each_host(monkeypatch):
    calls = []
    monkeypatch.setattr(loggers, "continue_files", lambda *arguments: calls.append(arguments))
    states = [{"kind": "CSVLogger", "name": "logs", "version": 3}]
    for is_first, local_rank in ((True, 0), (False, 0), (False, 1)):
        trainer = in_epoch_5(loggers=["a"], is_global_zero=is_first, local_rank=local_rank)
        run = resumed(run_of(trainer))
        run.part(LoggerPositions).restore([*states, "nothing"], Moment.COMPARED)
    assert calls == [(["a"], states, 12, True), (["a"], states, 12, False)]
