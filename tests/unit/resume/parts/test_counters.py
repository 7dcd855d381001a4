"""Counters of an epoch's end: what Lightning saves, and what a resumed run continues with."""

import copy

import pytest
from short_fits import Noted, interrupted, trainer
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.resume.parts import counters
from sagemaker_lightning.resume.parts.counters import Counters
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.resume_point import ResumePoint

COUNTS = {"ready": 3, "started": 3, "processed": 3, "completed": 2}
AT_THE_END = {
    "epoch_progress": {"total": COUNTS, "current": COUNTS},
    "epoch_loop.batch_progress": {"total": {"ready": 9}, "current": {"ready": 3, "done": 3}},
}


def test_counters_at_an_epochs_end_are_those_of_lightning():
    loop = copy.deepcopy(AT_THE_END)
    counters.move_counters_past_epoch(loop)
    assert loop == {
        "epoch_progress": dict.fromkeys(("total", "current"), COUNTS | {"completed": 3}),
        "epoch_loop.batch_progress": {"total": {"ready": 9}, "current": {"ready": 0, "done": 0}},
    }
    before = copy.deepcopy(loop)
    progress = loop["epoch_progress"]
    counters.move_counters_to_epoch_end(loop)
    assert loop["epoch_progress"] == dict.fromkeys(("total", "current"), COUNTS)
    assert progress == before["epoch_progress"]  # the loop's own, of which this is a copy


def test_lightning_loads_counters_of_after_an_epoch_alone():
    """And no states of loaders: each rank has saved its own."""
    for point in ResumePoint:
        loop = copy.deepcopy(AT_THE_END) | {"combined_loader": "states"}
        run = resumed(run_of(in_epoch_5()), point)
        run.part(Counters).restore({"loops": {"fit_loop": loop}}, Moment.LOADING)
        is_moved = loop["epoch_progress"]["total"]["completed"] == 3
        assert is_moved is (point is ResumePoint.EPOCH) and "combined_loader" not in loop


class Counted(Noted):
    """Notes the batches that Lightning has counted when an epoch begins."""

    def on_train_epoch_start(self):
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        self.note(f"counted {progress.ready} {progress.completed}")
        super().on_train_epoch_start()


@pytest.mark.parametrize("stop", ["epoch 1", "batch 1:2"])
def test_hooks_at_an_epochs_start_find_the_counts_of_the_epoch_before(tmp_path, stop):
    trainer(tmp_path / "alone", max_epochs=3).fit(alone := Counted())
    with interrupted():
        trainer(tmp_path / "run", max_epochs=3).fit(Counted(fails=stop))
    trainer(tmp_path / "run", max_epochs=3).fit(model := Counted())
    assert model.events == alone.events and "counted 4 4" in alone.events
