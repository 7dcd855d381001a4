"""What a checkpoint has for a run that resumes from it."""

from unittest import mock

import pytest
import torch
from torch import nn
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.resume.parts.limits import Limits
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.parts.rank_buffers import RankBuffers
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint


def test_where_training_is():
    for point in ResumePoint:
        run = resumed(run_of(in_epoch_5()), point)
        is_within = point is not ResumePoint.EPOCH
        assert run.resumes_within_epoch is is_within and run.epoch_is_open is is_within
        assert run.training_continues() is (point is ResumePoint.VALIDATION)
        assert not run.resumes_within_epoch and run.epoch_is_open is is_within
        run.epoch_ended()
        assert not run.epoch_is_open
    run = run_of(in_epoch_5())
    run.epoch_ended()
    assert not (run.resumes_within_epoch or run.epoch_is_open or run.training_continues())


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("", "nothing is left to train: step 12 was the last one; to train again, move {} away "),
        (
            "max_epochs=2",
            "nothing is left to train: step 12 is beyond max_epochs=2, and the model has that "
            "step's weights; to train again, move {} away or give another --resume.dirpath\n",
        ),
    ],
)
def test_why_nothing_is_left_to_train(tmp_path, capsys, limit, says):
    run = resumed(run_of(in_epoch_5(), tmp_path))
    run.part(Limits).exceeded = limit
    run._print_nothing_left()
    assert capsys.readouterr().out.startswith(says.format(tmp_path))
    run.trainer.is_global_zero = False
    run._print_nothing_left()
    assert capsys.readouterr().out == ""


def noting(place: Place, moments: tuple[Moment, ...]) -> type[Part]:
    """Return a part that notes what it restores."""

    class Noting(Part):
        def restore(self, saved, moment):
            self.run.noted.append((self.key, saved, moment))

    Noting.key, Noting.place, Noting.moments = place.name, place, moments
    return Noting


def test_each_part_is_restored_when_its_moment_comes():
    """In their order."""
    both = (Moment.HOOKS, Moment.TRAINING)
    kinds = [
        noting(Place.RANK, both),
        noting(Place.LIGHTNING, (Moment.TRAINING,)),
        noting(Place.RUN, both),
    ]
    for world_size in (1, 2):
        run = run_of(in_epoch_5())
        run.noted = []
        run.parts = [kind(run) for kind in kinds]
        run.restore(Moment.TRAINING)
        assert run.noted == []
        run = resumed(run, world_size=world_size, checkpoint={"a": 1}, RANK="r", RUN="all")
        run.restore(Moment.HOOKS)
        run.restore(Moment.TRAINING)
        hooks, training = both
        assert run.noted == [
            ("RANK", "r", hooks),
            ("RUN", "all", hooks),
            ("RANK", "r", training),
            ("LIGHTNING", {"a": 1}, training),
            ("RUN", "all", training),
        ]


def test_a_rank_gets_what_lightning_would_have_saved_for_it():
    """A checkpoint has Lightning's entries of rank 0, and those of others that differ."""
    overrides = {"entries": {"b": 3}, "exact_values": {"users": 3}}
    ranks = [{}, {"rank_overrides": overrides}]
    for world_size, rank, expected in ((2, 0, 2), (2, 1, 3), (3, 1, 2)):
        trainer = in_epoch_5(world_size=world_size, global_rank=rank)
        run = resumed(run_of(trainer), world_size=2, ranks=ranks, checkpoint={"a": 1, "b": 2})
        assert run.resumed.checkpoint == {"a": 1, "b": expected}
        own_values = overrides["exact_values"] if expected == 3 else {}
        assert run.resumed.exact_values == own_values


@pytest.mark.parametrize(
    ("before", "mesh", "ranks", "own"),
    [
        (3, [], 3, [[0], [1], [2]]),
        (3, [], 1, [[0, 1, 2]]),
        (3, [], 2, [[0, 2], [1]]),
        (2, [], 4, [[0], [1], [], []]),
        (6, [3, 2], 2, [[0, 4], [2]]),  # two ranks each share tensors, and have trained on the same
    ],
)
def test_from_which_ranks_a_rank_takes_over(before, mesh, ranks, own):
    for rank in range(ranks):
        run = run_of(in_epoch_5(world_size=ranks, global_rank=rank))
        saved = [{RankBuffers.key: number} for number in range(before)]
        resumed(run, world_size=before, ranks=saved).resumed.mesh = mesh
        taken, everyone = run.resumed.of_data_ranks(run.part(RankBuffers))
        assert taken == own[rank]
        assert everyone == (own[rank] if ranks == before else sorted(sum(own, [])))


def test_what_hooks_have_overwritten_is_restored_once(monkeypatch):
    """Hooks may set them as they like later; with an average, the model has its own weights."""
    for world_size, key in ((1, "state_dict"), (1, "current_model_state"), (2, "state_dict")):
        model = nn.Linear(1, 1, bias=False)
        trainer = in_epoch_5(
            lightning_module=model, optimizers=[torch.optim.SGD(model.parameters())]
        )
        one, other = ({"weight": torch.full((1, 1), number)} for number in (1.0, 2.0))
        groups = {"optimizer_states": [{"param_groups": [{"lr": 0.5, "params": [0]}]}]}
        run = resumed(
            run_of(trainer),
            world_size=world_size,
            checkpoint={"state_dict": other, **groups} | {key: one},
            shared_pruned_weights=[],
        )
        names = "state_dict", "optimizer_states", "shared_pruned_weights"
        objects = run.part(UserObjects)  # which the weights ask
        objects.moments = ()
        run.parts = [*(part for part in run.parts if part.key in names), objects]
        for part in run.parts:
            if part.key == "optimizer_states":
                part.restore(run.resumed.checkpoint, Moment.LOADING)
        nn.init.zeros_(model.weight)
        run.restore(Moment.HOOKS)
        assert model.weight.item() == 0.0
        run.restore(Moment.TRAINING)
        assert model.weight.item() == 1.0
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        assert rate == (0.5 if world_size == 1 else 0.001)


def test_a_new_run_begins_its_logs_on_the_first_rank(monkeypatch):
    begun = []
    monkeypatch.setattr(loggers, "begin_files", begun.append)
    for is_first in (True, False):
        run = run_of(in_epoch_5(loggers=["a"], is_global_zero=is_first))
        run.parts = []
        run.options.start_before = None
        run.part = lambda kind: mock.Mock()
        run.mark_start = lambda: None
        run.check = type("Check", (), {"check_restored": staticmethod(lambda differing: None)})
        run.training_begins()
    assert begun == [["a"], ()]


def test_what_is_not_restored_as_it_was_is_reported_with_why():
    """All ranks save again, and compare a part with what was saved of it."""

    class Own(Part):
        key = "own"
        why_differs = "another one"

        def save(self, point, state):
            return {"a": 1, "b": 2}

        def digest(self, saved, others):
            return saved

    run = run_of(in_epoch_5())
    run.parts = [Own(run)]
    assert run._differing() == {}
    run = resumed(run, own={"a": 1, "b": 3, "c": 4})
    assert run._differing() == {}  # such as with another number of ranks
    run.resumed.digests = run._digests({"own": run.resumed.of(Own)}, {})
    assert run._differing() == {"b": "another one", "c": "another one"}
    run.resumed.forget_digests(Own, "b".__eq__)
    assert run._differing() == {"c": "another one"}
