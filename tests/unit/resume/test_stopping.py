"""When a checkpoint is saved and when training stops."""

from itertools import product
from types import SimpleNamespace

import pytest

from sagemaker_lightning.resume import stopping
from sagemaker_lightning.resume.memory_copies import MemoryCopies
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.stopping import Action, Circumstances, Intervals, Stopping, decide

BATCH, VALIDATION, EPOCH = ResumePoint.BATCH, ResumePoint.VALIDATION, ResumePoint.EPOCH
NOTHING = Action()
SAVES = Action(saves=True)
COPIES = Action(copies=True)
WAITS = Action(saves=True, waits=True)
STOPS = Action(saves=True, waits=True, exits=True)
STOPS_UNSAVED = Action(exits=True)


@pytest.mark.parametrize(
    ("point", "now", "action"),
    [
        (BATCH, {}, NOTHING),
        (BATCH, {"is_due": True}, SAVES),
        (BATCH, {"is_due": True, "is_uploading": True}, NOTHING),
        (BATCH, {"is_due": True, "accumulates": True}, NOTHING),
        (BATCH, {"is_due": True, "only_epochs": True}, NOTHING),
        (BATCH, {"copy_is_due": True}, COPIES),
        (BATCH, {"copy_is_due": True, "is_due": True}, SAVES),
        (BATCH, {"copy_is_due": True, "is_due": True, "is_uploading": True}, COPIES),
        (BATCH, {"copy_is_due": True, "accumulates": True}, NOTHING),
        (BATCH, {"copy_is_due": True, "only_epochs": True}, NOTHING),
        (BATCH, {"copy_is_due": True, "stops": True, "only_epochs": True}, STOPS_UNSAVED),
        (BATCH, {"stops": True}, STOPS),
        (BATCH, {"stops": True, "is_uploading": True}, STOPS),
        (BATCH, {"stops": True, "accumulates": True}, STOPS),
        (BATCH, {"stops": True, "only_epochs": True}, STOPS_UNSAVED),
        (BATCH, {"is_done": True}, WAITS),
        (BATCH, {"is_done": True, "only_epochs": True}, WAITS),
        (BATCH, {"is_done": True, "stops": True}, WAITS),
        (EPOCH, {}, SAVES),
        (EPOCH, {"is_uploading": True}, Action(postpones=True)),
        (EPOCH, {"is_uploading": True, "stops": True}, STOPS),
        (EPOCH, {"is_uploading": True, "is_done": True}, WAITS),
        (EPOCH, {"is_done": True}, WAITS),
        (EPOCH, {"is_done": True, "stops": True}, WAITS),
        (EPOCH, {"stops": True}, STOPS),
        (EPOCH, {"stops": True, "only_epochs": True}, STOPS),
        (EPOCH, {"epoch_was_cut": True}, NOTHING),
        (EPOCH, {"epoch_was_cut": True, "is_done": True}, NOTHING),
        (EPOCH, {"epoch_was_cut": True, "stops": True}, STOPS_UNSAVED),
        (VALIDATION, {}, NOTHING),
        (VALIDATION, {"is_due": True, "copy_is_due": True}, NOTHING),
        (EPOCH, {"is_uploading": True, "copy_is_due": True}, Action(postpones=True)),
        (VALIDATION, {"stops": True}, STOPS),
        (VALIDATION, {"stops": True, "only_epochs": True}, STOPS_UNSAVED),
    ],
)
def test_what_is_done_where_nothing_is_half_done(point, now, action):
    assert decide(point, Circumstances(**now)) == action


def test_no_stop_is_forgotten_and_the_last_state_is_waited_for():
    """Whatever else is the case."""
    for values in product([False, True], repeat=len(Circumstances._fields)):
        now = Circumstances(*values)
        for point in ResumePoint:
            action = decide(point, now)
            assert action.exits is (now.stops and (not now.is_done or point is VALIDATION))
            assert action.saves or not action.waits
            assert action.waits or not (action.saves and action.exits)
            assert not (action.copies and (action.saves or action.exits))


@pytest.mark.parametrize(
    ("minutes", "seconds", "last", "is_due"),
    [
        (1, 59, 0, False),
        (1, 60, 0, True),
        (0, 1e9, 0, False),
        (1, 60, 0.7, False),  # a checkpoint of 0.7 s is a hundredth of 70 s
        (1, 71, 0.7, True),
    ],
)
def test_a_checkpoint_is_due_by_the_clock(minutes, seconds, last, is_due):
    assert Intervals(minutes, 0).has_passed(seconds, last) is is_due


@pytest.mark.parametrize(("steps", "step", "is_due"), [(0, 6, False), (3, 6, True), (3, 5, False)])
def test_a_checkpoint_is_due_by_steps(steps, step, is_due):
    assert Intervals(0, steps).ends_at(step) is is_due


def test_a_checkpoint_that_is_due_waits_until_it_is_saved(monkeypatch):
    """One that waits for an upload is saved at the next batch, and a step's is saved once."""
    monkeypatch.setattr(stopping, "gradients_accumulate", lambda trainer: False)
    saved = []
    said = SimpleNamespace(checkpoint_due=False, uploading=True, checkpoint_saved=lambda: None)
    said.copy_due = False
    said.copy_taken = lambda: None
    no_copies = MemoryCopies(None, 1, False)
    run = SimpleNamespace(agreement=said, trainer=SimpleNamespace(global_step=3), copies=no_copies)
    stops = Stopping(run, Intervals(0, 3))

    def save(point, last):
        saved.append((point, run.trainer.global_step))
        stops.checkpoint_saved(0.1)

    run.save = save
    monkeypatch.setattr(stops, "agree", lambda now=False: False)
    stops.batch_committed(done=False)
    assert saved == []
    said.uploading = False
    for _ in range(2):
        stops.batch_committed(done=False)
    assert saved == [(BATCH, 3)]
    said.uploading = True
    stops.epoch_committed(done=False)
    assert len(saved) == 1
    said.uploading = False
    stops.batch_committed(done=False)
    assert len(saved) == 2


def test_a_copy_that_is_due_waits_until_it_is_taken(monkeypatch):
    """While gradients are added up, none is taken."""
    adds = [True, False, False]
    monkeypatch.setattr(stopping, "gradients_accumulate", lambda trainer: adds.pop(0))
    copied = []
    said = SimpleNamespace(checkpoint_due=False, uploading=False, copy_due=True)
    said.copy_taken = lambda: setattr(said, "copy_due", False)
    noted = []
    copies = SimpleNamespace(state_saved=lambda: noted.append(True))
    run = SimpleNamespace(agreement=said, trainer=SimpleNamespace(global_step=3), copies=copies)
    run.copy = copied.append
    stops = Stopping(run, Intervals(0, 0))
    monkeypatch.setattr(stops, "agree", lambda now=False: False)
    stops.batch_committed(done=False)
    assert copied == noted == []
    for _ in range(2):
        stops.batch_committed(done=False)
    assert copied == [BATCH] and noted == [True]
