"""Counters of an epoch's end: what Lightning saves, and what a resumed run continues with."""

import copy

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
        "epoch_loop.batch_progress": {"total": {"ready": 9}, "current": {"ready": 3, "done": 3}},
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
