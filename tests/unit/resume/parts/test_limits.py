"""The limits of epochs and steps: what callbacks have added, and a checkpoint beyond them."""

from types import SimpleNamespace

import pytest
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.resume.parts.limits import Limits, add_to_limits, limits
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.resume_point import ResumePoint

OF_EPOCH_5 = {"loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 5}}}}}


def loading(run, of_flags=(9, -1), added=(0, 0)) -> Limits:
    """Return the part, after a checkpoint of epoch 5 was loaded."""
    saved = {"of_flags": list(of_flags), "added_limits": list(added)}
    run = resumed(run, checkpoint=OF_EPOCH_5, limits=saved)
    run.part(Limits).restore(saved, Moment.LOADING)
    return run.part(Limits)


@pytest.mark.parametrize(
    ("limit", "reached", "point", "is_done", "expected"),
    [
        (5, 5, ResumePoint.EPOCH, False, ""),
        (4, 5, ResumePoint.EPOCH, False, "max_epochs=4"),
        (5, 5, ResumePoint.BATCH, False, "max_epochs=5"),
        (5, 5, ResumePoint.BATCH, True, ""),
        (-1, 5, ResumePoint.EPOCH, False, ""),
        (None, 5, ResumePoint.EPOCH, False, ""),
    ],
)
def test_a_checkpoint_may_be_beyond_the_limit_of_epochs(limit, reached, point, is_done, expected):
    trainer = in_epoch_5()
    trainer.fit_loop.max_epochs = limit
    trainer.fit_loop.epoch_progress.current.processed = reached
    trainer.fit_loop.epoch_loop._is_training_done = is_done
    for run in (run_of(trainer), resumed(run_of(trainer), point)):
        run.part(Limits).loops_begin()
        assert run.part(Limits).exceeded == (expected if run.resumed else "")
    assert trainer.fit_loop.max_epochs == limit


@pytest.mark.parametrize(
    ("limit", "raised"), [(4, 5), (2, 5), (5, 5), (6, 6), (-1, -1), (None, None)]
)
def test_a_limit_is_raised_while_lightning_loads_a_checkpoint_beyond_it(limit, raised):
    """Hooks at the start of training, which run before and after, find the training's own."""
    trainer = in_epoch_5()
    trainer.fit_loop.max_epochs = limit
    part = loading(run_of(trainer))
    assert trainer.fit_loop.max_epochs == limit
    with part.loading_loops():
        assert trainer.fit_loop.max_epochs == raised
    assert trainer.fit_loop.max_epochs == limit


@pytest.mark.parametrize(("of_flags", "expected"), [((9, -1), [11, 4]), ((8, -1), [9, -1])])
def test_what_callbacks_have_added_is_added_to_the_same_limits(of_flags, expected):
    """Other limits of the flags replace it. A run saves what was added in all."""
    trainer = in_epoch_5()
    part = loading(run_of(trainer), of_flags, added=(2, 5))
    assert limits(trainer) == expected
    part.mark_start()
    added = [2, 5] if of_flags == (9, -1) else [0, 0]
    assert part.save(None, None) == {"of_flags": [9, -1], "added_limits": added}
    add_to_limits(trainer, [1, 0])
    assert part.save(None, None)["added_limits"] == [added[0] + 1, added[1]]


def test_what_hooks_add_at_the_start_is_added_again_by_them():
    trainer = in_epoch_5()
    part = run_of(trainer).part(Limits)
    add_to_limits(trainer, [3, 0])
    assert part.save(None, None)["added_limits"] == [3, 0]
    part.mark_start()
    assert part.save(None, None)["added_limits"] == [0, 0]


@pytest.mark.parametrize(
    ("epochs", "steps", "known", "added", "expected"),
    [
        (None, -1, [-1, -1], [0, 0], [-1, -1]),
        (3, 40, [3, 40], [2, -5], [5, 35]),
        (3, 40, [3, 40], [0, 7], [3, 47]),
        (3, -1, [3, -1], [-1, 0], [2, -1]),
    ],
)
def test_limits_that_a_callback_has_changed(epochs, steps, known, added, expected):
    loop = SimpleNamespace(max_epochs=epochs, epoch_loop=SimpleNamespace(max_steps=steps))
    trainer = SimpleNamespace(fit_loop=loop)
    assert limits(trainer) == known
    add_to_limits(trainer, added)
    assert limits(trainer) == expected
