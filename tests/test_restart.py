"""resume/restore.py and resume/fit_loops.py without a training: what is asked of a checkpoint."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import (
    fit_loops,
    model_changes,
    optimizer_arguments,
    restore,
)
from sagemaker_lightning.resume.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.restore import Restart
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph.state import names_in


def trainer_of(**values) -> SimpleNamespace:
    """Return what a Restart asks of a trainer, in epoch 5."""
    progress = SimpleNamespace(processed=5, completed=5)
    batches = SimpleNamespace(ready=1, started=1, processed=1, completed=1)
    loop = SimpleNamespace(
        max_epochs=9,
        epoch_progress=SimpleNamespace(current=progress),
        loaders=None,
        _should_reload_train_dl=False,
        _data_fetcher=None,
        epoch_loop=SimpleNamespace(
            max_steps=-1,
            _is_training_done=False,
            batch_progress=SimpleNamespace(current=batches),
            val_loop=SimpleNamespace(_seen_batches_per_dataloader={0: 1}),
        ),
    )
    known = {
        "fit_loop": loop,
        "current_epoch": 5,
        "reload_dataloaders_every_n_epochs": 0,
        "world_size": 1,
        "global_rank": 0,
        "local_rank": 0,
        "is_global_zero": True,
        "callbacks": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "loggers": [],
        "lightning_module": nn.Linear(1, 1),
        "train_dataloader": None,
        "datamodule": None,
    }
    return SimpleNamespace(**known | values)


def restart_of(folder, trainer=None, point=None, setting="--resume.dirpath", **entries) -> Restart:
    """Return a Restart that has loaded a checkpoint, if there are entries of one."""
    directory = CheckpointDir(CheckpointHome(folder), 3, setting)
    restart = Restart(trainer or trainer_of(), directory, SimpleNamespace(seed=7), None)
    restart.point = point
    restart.step = 12
    restart.file_name = "step-000000012.ckpt"
    restart.flags = {}
    if entries:
        restart.entries = {"world_size": 1, "limits": [9, -1]} | entries
    return restart


# Epochs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "reached", "is_open", "is_done", "expected"),
    [
        (5, 5, False, False, ""),
        (4, 5, False, False, "max_epochs=4"),
        (5, 5, True, False, "max_epochs=5"),
        (5, 5, True, True, ""),
        (-1, 5, False, False, ""),
        (None, 5, False, False, ""),
    ],
)
def test_a_checkpoint_may_be_beyond_the_limit_of_epochs(
    tmp_path, limit, reached, is_open, is_done, expected
):
    trainer = trainer_of()
    trainer.fit_loop.max_epochs = limit
    trainer.fit_loop.epoch_progress.current.processed = reached
    trainer.fit_loop.epoch_loop._is_training_done = is_done
    for entries in ({}, {"step": 12}):
        restart = restart_of(tmp_path, trainer, **entries)
        restart.epoch_is_open = is_open
        restart.restore_epoch_limit()
        assert restart.limit_exceeded == (expected if entries else "")
    assert trainer.fit_loop.max_epochs == limit


@pytest.mark.parametrize(
    ("limit", "raised"), [(4, 5), (2, 5), (5, 5), (6, 6), (-1, -1), (None, None)]
)
def test_a_limit_is_raised_while_lightning_loads_a_checkpoint_beyond_it(tmp_path, limit, raised):
    trainer = trainer_of()
    trainer.fit_loop.max_epochs = limit
    restart = restart_of(tmp_path, trainer, step=12)
    restart._raise_epoch_limit(5)
    assert trainer.fit_loop.max_epochs == raised
    restart.restore_epoch_limit()
    assert trainer.fit_loop.max_epochs == limit


def test_a_limit_that_was_raised_is_lowered_once(tmp_path):
    restart = restart_of(tmp_path, step=12)
    restart.raised_epochs = 2
    for _ in range(2):
        restart.restore_epoch_limit()
        assert restart.trainer.fit_loop.max_epochs == 7


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("", "nothing is left to train: step 12 was the last one; to train anew, move {} away or "),
        (
            "max_epochs=2",
            "nothing is left to train: step 12 is beyond max_epochs=2, and the model has that "
            "step's weights; to train anew, move {} away or give another --resume.dirpath\n",
        ),
    ],
)
def test_why_nothing_is_left_to_train(tmp_path, capsys, limit, says):
    restart = restart_of(tmp_path, step=12)
    restart.limit_exceeded = limit
    restart.print_nothing_left()
    assert capsys.readouterr().out.startswith(says.format(tmp_path))
    restart.trainer.is_global_zero = False
    restart.print_nothing_left()
    assert capsys.readouterr().out == ""


class Making(LightningModule):
    """Makes a thing that no checkpoint holds when an epoch starts."""

    made = 0

    def on_train_epoch_start(self):
        self.thing = object()
        self.made += 1


def test_hooks_make_again_what_no_checkpoint_holds(tmp_path):
    """In a resumed run, which within an epoch has no start of it."""
    model = Making()
    trainer = trainer_of(lightning_module=model, val_dataloaders=None)
    asked = []
    objects = SimpleNamespace(
        missing_attributes=lambda held: (asked.append(held), [("model", "thing")])[1]
    )
    restart_of(tmp_path, trainer).recreate_objects(objects)
    assert (model.made, asked) == (0, [])
    restart_of(tmp_path, trainer, ranks=[{"held": "state"}]).recreate_objects(objects)
    assert (model.made, asked) == (1, ["state"])


def test_where_training_is(tmp_path):
    restart = restart_of(tmp_path, step=12)
    for point in ResumePoint:
        restart.point = point
        assert restart.resumes_within_epoch is (point is not ResumePoint.EPOCH)
        assert restart.resumes_in_validation is (point is ResumePoint.VALIDATION)
    restart.epoch_is_open = True
    restart.training_continues()
    assert not restart.resumes_within_epoch and restart.epoch_is_open
    restart.epoch_ended()
    assert not restart.epoch_is_open


# Data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "made", "some", "epoch", "stay"),
    [
        (0, None, False, 5, True),
        (0, None, True, 5, True),
        (3, 3, False, 3, True),
        (3, 3, True, 5, True),
        (3, 2, False, 5, False),
        (3, -float("inf"), False, 5, False),
        (3, None, False, 5, False),
    ],
)
def test_the_epoch_of_the_validation_data(tmp_path, every, made, some, epoch, stay):
    trainer = trainer_of(reload_dataloaders_every_n_epochs=every)
    restart = restart_of(tmp_path, trainer, validation_made=made, validation_batches={0: 7, 1: 3})
    assert restart.epoch_of_validation_data(some) == epoch
    restart.validation_data_made()
    seen = trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
    assert seen == ({0: 7, 1: 3} if stay else {0: 1})


def test_a_new_run_has_no_validation_data_of_before(tmp_path):
    restart = restart_of(tmp_path)
    assert restart.epoch_of_validation_data(False) == 5
    restart.validation_data_made()
    assert not restart.had_validation_data
    for name, had in (("the length of train.0", False), ("val.0", False)):
        restart.saved_digests[name] = 1
        assert restart.had_validation_data is had
    restart.saved_digests["the length of val.0.dataset"] = 1
    assert restart.had_validation_data


class Objects:
    """Notes what is asked of a Snapshot and of the state of a user's objects."""

    def __init__(self) -> None:
        self.calls = []
        self.user_state = self
        self.state = SimpleNamespace(mark=lambda: self.calls.append("mark"))

    def restore_state_before_data(self, saved):
        self.calls.append(("restore", saved))

    def set_state_before_data(self, saved):
        self.calls.append(("set", saved))

    def state_before_data(self):
        return {"graph": record(["train.0", "new"]), "generators": {"model.rng": 2}}


def record(*changes: list[str]) -> dict:
    """Return the record of objects of which attributes have changed: path and name."""
    nodes = [["object", path, {"names": [name]}, [1], None] for path, name in changes]
    return {"nodes": json.dumps(nodes), "tensors": []}


@pytest.fixture
def seeds(monkeypatch) -> list[tuple]:
    """What was seeded."""
    seeded = []
    monkeypatch.setattr(restore, "seed_all", lambda *key: seeded.append(key))
    return seeded


def recreated(restart: Restart, fails: bool = False) -> tuple[list, int]:
    """Return what was asked while data were created, and the epoch that they were created in."""
    objects = Objects()
    loop = restart.trainer.fit_loop
    seen = []
    try:
        with restart.recreating_data(loop, objects):
            seen.append(loop.epoch_progress.current.completed)
            objects.calls.append("created")
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    assert loop.epoch_progress.current.completed == 5
    return objects.calls, seen[0]


BEFORE = {"graph": 1, "generators": 2, "other": 3}
BEFORE_DATA = [("restore", BEFORE), ("set", {"graph": 1, "generators": 2})]


def test_data_are_created_as_of_their_epoch(tmp_path, seeds):
    entries = {"made": 2, "before_data": BEFORE}
    expected = [*BEFORE_DATA, "mark", "created"], 2
    assert recreated(restart_of(tmp_path, **entries)) == expected
    assert recreated(restart_of(tmp_path, **entries), fails=True) == expected
    assert recreated(restart_of(tmp_path, **entries | {"before_data": None})) == (
        ["mark", "created"],
        2,
    )
    assert seeds == [("data", 7, 2)] * 3
    assert recreated(restart_of(tmp_path, **entries, world_size=2))[0] == ["mark", "created"]


def test_data_of_the_first_epoch_are_seeded_as_ever(tmp_path, seeds):
    assert recreated(restart_of(tmp_path, made=0, before_data=None)) == (["mark", "created"], 0)
    for entries in ({}, {"made": -float("inf"), "before_data": BEFORE}):
        assert recreated(restart_of(tmp_path, **entries)) == (["created"], 5)
    assert seeds == []


def test_data_that_are_made_anew_are_those_of_the_epoch(tmp_path, seeds):
    restart = restart_of(tmp_path, made=2, before_data=BEFORE)
    restart.trainer.fit_loop.loaders = object()
    assert recreated(restart) == (["created"], 5) and seeds == []
    restart.trainer.fit_loop._should_reload_train_dl = True
    assert recreated(restart) == (["created"], 5) and seeds == [("data", 7, 5)]


@pytest.mark.parametrize(
    ("point", "every", "is_due"),
    [
        (ResumePoint.EPOCH, 3, True),
        (ResumePoint.EPOCH, 4, False),
        (ResumePoint.EPOCH, 0, False),
        (ResumePoint.BATCH, 3, False),
    ],
)
def test_an_epoch_that_needs_new_data_gets_them(tmp_path, seeds, point, every, is_due):
    """The old data's state does not fit them, and is not compared."""
    held = {
        "graph": record(["train.0", "old"], ["model", "count"]),
        "generators": {"model.other": 3},
        "settings": {"val_check_batch": 4, "limit": 5},
    }
    restart = restart_of(
        tmp_path, point=point, made=2, before_data=BEFORE, ranks=[{"held": copy.deepcopy(held)}]
    )
    restart.trainer.reload_dataloaders_every_n_epochs = every
    digests = dict.fromkeys(
        [
            "train.0.old",
            "train.0.new",
            "model.count",
            "generators model.rng",
            "generators model.other",
            "settings val_check_batch",
            "settings limit",
            "the length of train.0.dataset",
        ],
        1,
    )
    restart.saved_digests = dict(digests)
    calls, epoch = recreated(restart)
    assert epoch == (5 if is_due else 2) and seeds == [("data", 7, epoch)]
    assert restart.loader_states_used is is_due
    if not is_due:
        assert restart.saved_digests == digests and calls[0] == ("restore", BEFORE)
        return
    assert set(names_in(calls[0][1]["graph"])) >= {"model.count"}
    assert set(restart.saved_digests) == {
        "model.count",
        "generators model.other",
        "settings limit",
    }
    graph = restart.entries["ranks"][0]["held"].pop("graph")
    assert set(names_in(graph)) == {"model", "model.count"}
    assert restart.entries["ranks"][0]["held"] == {
        "newer graph": record(["train.0", "new"]),
        "generators": {"model.rng": 2},
        "settings": {"limit": 5},
    }


class EpochPlan:
    """The epoch_plan of an epoch that other ranks began."""

    def continue_from(self, epoch, reached):
        self.began = epoch, reached

    def of_epoch(self, epoch):
        return "order", 10 * epoch


def loads(epoch_plan) -> SimpleNamespace:
    return SimpleNamespace(exactly=SimpleNamespace(epoch_plan=epoch_plan))


RUN = {"flags": "{}", "sizes": [], "workers": [], "ranks": 2}


def test_the_rest_of_an_epoch_is_shared_out_anew(tmp_path):
    epoch_plan = EpochPlan()
    trainer = trainer_of(train_dataloader=loads(epoch_plan))
    entries = {"world_size": 2, "reached": 6, "run": RUN}
    restart = restart_of(tmp_path, trainer, ResumePoint.BATCH, **entries)
    restart.redistribute_epoch(trainer.fit_loop)
    assert epoch_plan.began == (5, 6)
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.current).values()) == {50}


@pytest.mark.parametrize(
    ("loader", "reached"), [(None, 6), (loads(None), 6), (loads(EpochPlan()), None)]
)
def test_an_epoch_that_cannot_be_shared_out_anew_is_refused(tmp_path, loader, reached):
    trainer = trainer_of(train_dataloader=loader)
    entries = {"world_size": 2, "reached": reached, "run": RUN}
    says = (
        f"^--resume.dirpath={tmp_path}: step 12 was saved within an epoch by 2 ranks, and its data "
        "cannot be shared out anew among 1; give as many devices and nodes as before$"
    )
    with pytest.raises(UserError, match=says):
        restart_of(tmp_path, trainer, ResumePoint.BATCH, **entries).redistribute_epoch(None)
    for point, ranks in ((ResumePoint.EPOCH, 2), (ResumePoint.BATCH, 1)):
        restart = restart_of(tmp_path, trainer, point, **entries | {"world_size": ranks})
        restart.redistribute_epoch(trainer.fit_loop)
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.current).values()) == {1}


def test_another_number_is_refused_if_it_is_not_that_of_the_workers(tmp_path):
    """Which is known as soon as there are loaders."""
    run = {"flags": '{"--data.count": 0}', "sizes": [4, None], "workers": [0], "ranks": 1}
    restart = restart_of(tmp_path, point=ResumePoint.EPOCH, run=run)
    restart.flags = {"--data.count": 0}
    restart.redistribute_epoch(None)
    restart.flags = {"--data.count": 2}
    with pytest.raises(UserError, match="is of another run: --data.count was 0, is 2; continue"):
        restart.redistribute_epoch(None)


def test_the_states_of_loaders_are_taken_once(tmp_path):
    given = []
    loop = SimpleNamespace(loaders=SimpleNamespace(give_back=given.append))
    ranks = [{"held": {"loaders": {"a": 1}}}]
    restart = restart_of(tmp_path, point=ResumePoint.EPOCH, ranks=ranks)
    restart.restore_loaders(loop)
    assert given == [{"a": 1}]
    restart.point = ResumePoint.BATCH
    restart.restore_loaders(loop)
    assert restart.take_loader_states() == {"a": 1} and restart.take_loader_states() is None
    restart.point = ResumePoint.EPOCH
    restart.restore_loaders(loop)
    new = restart_of(tmp_path, point=ResumePoint.EPOCH)
    new.restore_loaders(loop)
    assert given == [{"a": 1}] and new.take_loader_states() is None
    restart = restart_of(tmp_path, ranks=ranks)
    restart.discard_loader_states()
    assert restart.take_loader_states() is None


@pytest.mark.parametrize(
    ("point", "ranks", "restores"),
    [(ResumePoint.BATCH, 1, True), (ResumePoint.EPOCH, 1, False), (ResumePoint.BATCH, 2, False)],
)
def test_samplers_are_restored_within_an_epoch(tmp_path, point, ranks, restores):
    restored = []
    entries = {"ranks": [{"held": "state"}], "world_size": ranks}
    restart = restart_of(tmp_path, point=point, **entries)
    restart.restore_after_drawing(SimpleNamespace(restore_after_drawing=restored.append))
    assert restored == ["state"] * restores


def test_each_rank_has_its_own_state(tmp_path):
    entries = {"world_size": 2, "ranks": [{"held": {"loaders": rank}} for rank in (0, 1)]}
    trainer = trainer_of(world_size=2, global_rank=1)
    assert restart_of(tmp_path, trainer, **entries).take_loader_states() == 1
    trainer = trainer_of(world_size=3, global_rank=1)
    assert restart_of(tmp_path, trainer, **entries).take_loader_states() == 0


class Calls:
    """Notes each call of any function."""

    def __init__(self) -> None:
        self.noted = []

    def __getattr__(self, name):
        return lambda *arguments, **named: self.noted.append((name, *arguments[1:], *named.items()))


@pytest.mark.parametrize(
    ("point", "ranks", "key"),
    [
        (ResumePoint.BATCH, 1, "state_dict"),
        (ResumePoint.EPOCH, 1, "current_model_state"),
        (ResumePoint.BATCH, 2, "state_dict"),
    ],
)
def test_what_hooks_have_overwritten_is_restored_once(tmp_path, monkeypatch, point, ranks, key):
    """Before the hooks, only plain values are; with an average, the model has its own weights."""
    calls = Calls()
    monkeypatch.setattr(restore, "epoch_state", calls)
    for name in ("continue_averaging", "share_original_weights"):
        monkeypatch.setattr(model_changes, name, getattr(calls, name))
    model = nn.Linear(1, 1)
    trainer = trainer_of(lightning_module=model, optimizers=[torch.optim.SGD(model.parameters())])
    rank_state = {"held": "state", "parts": {}}
    entries = {"world_size": ranks, "ranks": [rank_state], "shown": "metrics", "tickets": "tickets"}
    restart = restart_of(tmp_path, trainer, point, **entries)
    restart.saved_groups = [[{"lr": 0.5}]]
    restart.same_rates = ranks == 1
    one, other = ({"weight": torch.full((1, 1), number)} for number in (1.0, 2.0))
    restart.checkpoint = {"state_dict": other} | {key: one}
    user_state = SimpleNamespace(restore=lambda *arguments: calls.noted.append(arguments))
    restored = [
        ("restore_newest_metrics", "metrics"),
        *([("restore_rank_state", rank_state, ("mid_epoch", key == "state_dict"))] * (ranks == 1)),
        ("restore_gradients", [rank_state]),
    ]
    nn.init.zeros_(model.weight)
    restart.restore(user_state, only_plain=True)
    assert model.weight.item() == 0.0
    restart.restore(user_state)
    assert model.weight.item() == 1.0
    assert trainer.optimizers[0].param_groups[0]["lr"] == (0.5 if ranks == 1 else 0.001)
    nn.init.zeros_(model.weight)
    restart.restore(user_state)
    assert model.weight.item() == 0.0
    plain, whole = (("state", only_plain, ranks == 1) for only_plain in (True, False))
    first = ("continue_averaging", [[{"lr": 0.5}]], point)
    shared = ("share_original_weights", "tickets")
    assert calls.noted == [
        *(first, *restored, plain),
        *(shared, *restored, whole),
        *(*restored, whole),
    ]
    calls.noted.clear()
    restart_of(tmp_path, trainer).restore(user_state)
    restart_of(tmp_path, trainer).restore(user_state, only_plain=True)
    assert calls.noted == []


# Other settings -----------------------------------------------------------------------------------


def optimizing(rate: float = 0.1, steps: int = 10, **values) -> SimpleNamespace:
    """Return a trainer with an optimizer and a schedule."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    config = SimpleNamespace(scheduler=CosineAnnealingLR(optimizer, steps))
    vars(config).update(interval="step", frequency=1, monitor=None, reduce_on_plateau=False)
    return trainer_of(
        lightning_module=model, optimizers=[optimizer], lr_scheduler_configs=[config], **values
    )


def compared(tmp_path, trainer, other_settings=False, **entries) -> None:
    """Compare the optimizers with those that a run had which began with 0.1 and 10 steps."""
    before = optimizer_arguments.describe(optimizing())
    restart = restart_of(tmp_path, trainer, **{"run": {"optimizers": before}} | entries)
    restart.other_settings = other_settings
    restart.optimizers_made()
    assert restart.optimizer_arguments == optimizer_arguments.describe(trainer)


LONGER = (
    "warning: T_max of CosineAnnealingLR was 10, is 20: this run goes on from its checkpoint, and "
    "may end with other weights than a run that begins with these settings\n"
)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ({}, {"other_settings": True}),
        ({}, {"world_size": 2}),
        ({}, {"limits": [8, -1]}),
        ({"callbacks": [BatchSizeFinder()]}, {}),
    ],
)
def test_a_schedule_may_be_made_for_another_length(tmp_path, capsys, trainer, options):
    compared(tmp_path, optimizing(steps=20, **trainer), **options)
    assert capsys.readouterr().out == LONGER
    compared(tmp_path, optimizing(steps=20, **trainer, is_global_zero=False), **options)
    compared(tmp_path, optimizing(**trainer), **options)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("callbacks", [[], [LearningRateFinder()]])
def test_another_schedule_is_refused(tmp_path, callbacks):
    with pytest.raises(UserError, match="is of another run: T_max of CosineAnnealingLR was 10, is"):
        compared(tmp_path, optimizing(steps=20, callbacks=callbacks))


def test_another_rate_is_refused_unless_something_sets_it(tmp_path, capsys):
    with pytest.raises(UserError, match="is of another run: lr of SGD was 0.1, is 0.2; continue"):
        compared(tmp_path, optimizing(0.2))
    with pytest.raises(UserError, match="lr of SGD was 0.1, is 0.2"):
        compared(tmp_path, optimizing(0.2), limits=[8, -1])
    for callback in (LearningRateFinder(), BatchSizeFinder()):
        compared(tmp_path, optimizing(0.2, callbacks=[callback]))
    compared(tmp_path, optimizing(0.2), other_settings=True)
    compared(tmp_path, optimizing(0.2), world_size=2)
    assert capsys.readouterr().out == ""


def test_a_new_run_is_compared_with_nothing(tmp_path):
    restart = restart_of(tmp_path, trainer := optimizing(0.2))
    restart.optimizers_made()
    assert restart.optimizer_arguments == optimizer_arguments.describe(trainer)


@pytest.mark.parametrize("number", [4, 5])
def test_of_many_differences_four_are_named(tmp_path, number):
    before = optimizer_arguments.describe(optimizing())
    for index in range(number):
        before["arguments"][f"x{index} of SGD"] = str(index)
    trainer = optimizing()
    restart = restart_of(tmp_path, trainer, run={"optimizers": before})
    for index in range(number):
        trainer.optimizers[0].defaults[f"x{index}"] = 9
    rest = " (and 1 more)" if number > 4 else ""
    named = "; ".join(f"x{index} of SGD was {index}, is 9" for index in range(4))
    with pytest.raises(UserError) as raised:
        restart.optimizers_made()
    assert str(raised.value) == (
        f"--resume.dirpath={tmp_path}: step-000000012.ckpt is of another run: {named}{rest}; "
        "continue with the same settings, or give another folder, or move the checkpoints away "
        "to start anew; --resume.other_settings=true allows another learning rate, gradient "
        "clipping or precision"
    )


def test_other_classes_are_refused(tmp_path):
    before = optimizer_arguments.describe(optimizing())
    trainer = optimizing()
    trainer.lr_scheduler_configs = []
    setting = "ExactResume(dirpath=...)"
    restart = restart_of(tmp_path, trainer, setting=setting, run={"optimizers": before})
    with pytest.raises(
        UserError,
        match=rf"^ExactResume\(dirpath={tmp_path}\): step.* the scheduler was CosineAnnealingLR, "
        r"is none; .*; ExactResume\(other_settings=True\) allows another",
    ):
        restart.optimizers_made()


def test_parameter_groups_of_a_resumed_run_are_made_again(tmp_path):
    trainer = optimizing()
    weight, bias = (trainer.lightning_module.weight, trainer.lightning_module.bias)
    restart_of(tmp_path, trainer).restore_parameter_groups()
    assert trainer.optimizers[0].param_groups[0]["params"] == [weight, bias]
    restart_of(tmp_path, trainer, groups=[[["bias"], ["weight"]]]).restore_parameter_groups()
    groups = [group["params"] for group in trainer.optimizers[0].param_groups]
    assert groups[0][0] is bias and groups[1][0] is weight


# Logs ---------------------------------------------------------------------------------------------


def test_logs_are_continued_once_on_each_host(tmp_path, monkeypatch):
    """A new run begins them, on the first rank alone."""
    calls = []
    for name in ("begin_files", "continue_files"):
        monkeypatch.setattr(
            loggers, name, lambda *arguments, name=name: calls.append((name, *arguments))
        )
    states = [{"kind": "CSVLogger", "name": "logs", "version": 3}]
    entries = {"loggers": [*states, "nothing"]}
    for is_first, local_rank in ((True, 0), (False, 0), (False, 1)):
        trainer = trainer_of(loggers=["a"], is_global_zero=is_first, local_rank=local_rank)
        restart_of(tmp_path, trainer).continue_logs()
        restart_of(tmp_path, trainer, **entries).continue_logs()
    assert [call for call in calls if call[0] == "begin_files"] == [
        ("begin_files", ["a"]),
        ("begin_files", ()),
        ("begin_files", ()),
    ]
    assert [call for call in calls if call[0] == "continue_files"] == [
        ("continue_files", ["a"], states, 12, True),
        ("continue_files", ["a"], states, 12, False),
    ]


# Loops --------------------------------------------------------------------------------------------


def test_counters_at_an_epochs_end_are_those_of_lightning():
    counts = {"ready": 3, "started": 3, "processed": 3, "completed": 2}
    loop = {
        "epoch_progress": {"total": dict(counts), "current": dict(counts)},
        "epoch_loop.batch_progress": {"total": {"ready": 9}, "current": {"ready": 3, "done": 3}},
    }
    fit_loops.move_counters_past_epoch(loop)
    assert loop == {
        "epoch_progress": dict.fromkeys(("total", "current"), counts | {"completed": 3}),
        "epoch_loop.batch_progress": {"total": {"ready": 9}, "current": {"ready": 0, "done": 0}},
    }
    before = copy.deepcopy(loop)
    progress = loop["epoch_progress"]
    fit_loops.move_counters_to_epoch_end(loop)
    assert loop["epoch_progress"] == dict.fromkeys(("total", "current"), counts)
    assert progress == before["epoch_progress"]  # the loop's own, of which this is a copy
