"""A run in trainings of a few batches: when it saves, from where it resumes, what it says.

They run in this process and take some hundredths of a second each.
"""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.tuner import Tuner
from short_trainings import (
    Announces,
    At,
    ByHand,
    Line,
    Streamed,
    TurnedClock,
    Validated,
    end,
    equal,
    fail,
    failed,
    fit,
    interrupted,
    press_ctrl_c,
    resume_of,
    saved,
    trainer,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from sagemaker_lightning import SageMakerEnvironment, UserError
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.contract import reporting
from sagemaker_lightning.resume.check import journal
from sagemaker_lightning.resume.files import checkpoint_dir, checkpoint_file, folder_lock
from sagemaker_lightning.resume.run import Run
from sagemaker_lightning.resume.same_run import earlier_fits


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, {6: "epoch"}),
        ({"max_epochs": 3, "keep": 2}, {12: "epoch", 18: "epoch"}),
        ({"every_n_steps": 2}, {2: "batch", 4: "batch", 6: "epoch"}),
        ({"every_n_steps": 2, "keep": 1}, {6: "epoch"}),
        ({"every_n_steps": 4, "max_epochs": 2}, {6: "epoch", 8: "batch", 12: "epoch"}),
        ({"every_n_steps": 1, "accumulate_grad_batches": 3}, {1: "batch", 2: "epoch"}),
        ({"every_n_steps": 4, "model": ByHand}, {4: "batch", 6: "epoch"}),
        ({"max_steps": 4}, {4: "batch"}),
        ({"ends": "end of batch 3"}, {3: "batch"}),
        ({"saves": False}, {}),
        ({"exact": False}, {}),
        ({"fast_dev_run": True}, {}),
    ],
)
def test_when_checkpoints_are_saved(tmp_path, options, when):
    """At the end of an epoch, by steps, and where a limit ends the training."""
    ends = options.pop("ends", "never")
    model = options.pop("model", Line)()
    fit(tmp_path / "run", At(ends, end), model=model, **options)
    assert saved(tmp_path / "run") == when
    assert (tmp_path / "run").exists() is bool(when)


def test_the_journal_has_what_follows_the_oldest_checkpoint(tmp_path):
    """It begins with the first batch of an epoch."""
    fit(tmp_path, max_epochs=5, keep=2)
    oldest, _ = sorted(tmp_path.glob("step-*.ckpt"))
    run = checkpoint_file.read(oldest)[checkpoint_file.ENTRIES_KEY]["journal"]
    steps = [step.position for step in journal.read(tmp_path, run, 0, 1)[0]]
    assert steps == [(epoch, batch) for epoch in (3, 4) for batch in range(6)]


@pytest.mark.parametrize(
    ("minutes", "slow", "seconds", "steps"),
    [
        (1, "", 0.0, [1, 2, 3, 4, 5, 6]),
        (1.5, "", 0.0, [2, 4, 6]),
        (2, "", 0.0, [2, 4, 6]),
        (0, "", 0.0, [6]),
        (1, "2", 1.205, [1, 2, 5, 6]),
    ],
)
def test_checkpoints_by_the_clock(tmp_path, monkeypatch, minutes, slow, seconds, steps):
    """After so many minutes; after more if they cost more than a hundredth of the time."""
    clock = TurnedClock(monkeypatch, slow, seconds)
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", False)
    fit(tmp_path, clock, every_n_minutes=minutes, keep=9)
    assert [*saved(tmp_path)] == steps


def test_the_clock_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    def looks(writer) -> bool:
        looked.append(writer)
        return len(looked) < 4

    looked = []
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", property(looks))
    fit(tmp_path, TurnedClock(monkeypatch, "", 0.0), every_n_minutes=1, keep=9)
    assert [*saved(tmp_path)] == [4, 5, 6]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Line:
    """A model that was trained without an interruption."""
    return fit(tmp_path_factory.mktemp("alone"))


AS_IT_WAS = "the state is as it was saved, and the next batch is the expected one, bit for bit"


def test_a_run_that_is_stopped_twice_ends_with_the_same_weights(tmp_path, capfd, alone):
    """The last time with the same trainer. Each result is said as soon as it is known."""
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c))
    again = trainer(tmp_path, At("batch 3", press_ctrl_c), Announces())
    capfd.readouterr()
    with interrupted():
        again.fit(Line())
    output = capfd.readouterr()
    assert output.out.splitlines() == [
        f"resuming from step 1: {tmp_path / 'step-000000001.ckpt'}",
        "batch 2",
        f"resumed at step 1: {AS_IT_WAS}",
        "batch 3",
    ]
    assert output.err.splitlines()[-2:] == [
        "stopping at the end of this batch; Ctrl-C again stops at once",
        f"interrupted, resume from step 3: SIGINT; {tmp_path / 'step-000000003.ckpt'} is complete "
        f"[{reporting.host_and_rank()}]",
    ]
    again.fit(model := Line())
    assert equal(model, alone)
    assert saved(tmp_path) == {1: "batch", 3: "batch", 6: "epoch"}
    result = {"identical": True, "steps": 0, "said": AS_IT_WAS}
    assert resume_of(again).resumes == [{"step": 1} | result, {"step": 3} | result]


def test_what_an_interruption_makes_begin_anew_says_so(tmp_path, capfd):
    """At its start, and when it is interrupted."""
    job = SageMakerEnvironment(is_job=True)
    with interrupted():
        fit(tmp_path, At("batch 3", press_ctrl_c), environment=job)
    output = capfd.readouterr()
    lost = "the job has no CheckpointConfig"
    assert output.out.splitlines()[0].startswith(
        f"warning: an interruption makes this run start over: {lost}; give it one ("
    )
    assert (
        f"\ninterrupted, resume from step 0: SIGINT; {lost}, so the next run starts over ["
    ) in output.err


ONLY_EPOCHS = "short_trainings.Stream draws other batches each time, perhaps also in a resumed run"


@pytest.mark.parametrize(
    ("moment", "step", "says"),
    [
        ("batch 8", 6, "{} is complete; {}, so the run goes back to the end of an epoch"),
        ("validation 0", 0, "there is no checkpoint; {1}, so the run goes back to the end of an "),
        ("end of epoch 0", 6, "{} is complete ["),
    ],
)
def test_a_run_that_is_resumed_only_at_the_end_of_an_epoch_says_so(
    tmp_path, capfd, moment, step, says
):
    """Once."""
    with interrupted():
        fit(
            tmp_path,
            At(moment, press_ctrl_c),
            model=Streamed(),
            every_n_steps=2,
            max_epochs=3,
        )
    assert saved(tmp_path) == ({6: "epoch"} if step else {})
    output = capfd.readouterr()
    line = f"{ONLY_EPOCHS}: checkpoints are saved only at the end of an epoch, and a stopped run "
    assert output.out.count(line + "goes back to the last one") == 1
    said = says.format(tmp_path / "step-000000006.ckpt", ONLY_EPOCHS)
    assert f"interrupted, resume from step {step}: SIGINT; {said}" in output.err


@pytest.mark.parametrize(
    ("moment", "options", "refused"),
    [("never", {}, True), ("never", {"saves": False}, False), ("batch 2", {}, False)],
)
def test_another_model_with_the_same_folder_is_one_line(tmp_path, moment, options, refused):
    """It would get the weights of the first one. The same model may be trained on.

    A training that was interrupted continues with any.
    """
    used = trainer(tmp_path, At(moment, press_ctrl_c), **options)
    with nullcontext() if moment == "never" else interrupted():
        used.fit(model := Line())
    if moment == "never":
        trainer(tmp_path, max_epochs=2, **options).fit(model)
    says = r"\): this program has already trained another model to its end with these checkpoints; "
    with pytest.raises(UserError, match=says) if refused else nullcontext():
        trainer(tmp_path, max_epochs=3, **options).fit(Line())


def test_a_training_that_saves_nothing_leaves_the_folder_to_other_models(tmp_path):
    trainer(tmp_path, saves=False).fit(Line())
    with interrupted():
        trainer(tmp_path, At("batch 2", press_ctrl_c)).fit(Line())
    trainer(tmp_path).fit(Line())
    assert [*saved(tmp_path)] == [2, 6]


def test_another_seed_is_one_line(tmp_path):
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c))
    with pytest.raises(UserError, match=r"ExactResume\(seed=...\) was 1, is 2; "):
        fit(tmp_path, seed=2)


def test_numbers_that_a_program_changes_between_two_trainings_are_ignored(tmp_path, capfd):
    """They are compared where a new process continues."""
    model = Line()
    model.patience = 3
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c), model=model)
    model.patience = 4
    fit(tmp_path, model=model)
    assert "patience" not in capfd.readouterr().out


def longer_data() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(20.0)[:, None] / 20), 2, shuffle=True)


def test_a_program_that_trains_on_was_not_interrupted(tmp_path, capfd):
    """It may have other data then, and a callback that remembers its first training."""

    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    used = trainer(tmp_path, averaging, At("batch 25", press_ctrl_c), max_epochs=2, strict=True)
    used.fit(model := Line())
    used.fit_loop.max_epochs = 4
    model.train_dataloader = longer_data
    with pytest.raises(SystemExit):
        used.fit(model)
    assert "resum" not in capfd.readouterr().out.replace("interrupted, resume from step 25", "")
    used.fit(model)  # this one was interrupted
    assert "resumed at step 25: " in capfd.readouterr().out
    assert [result["step"] for result in resume_of(used).resumes] == [25]


class ValidatedLater(Validated):
    """Has no validation data of its own."""

    val_dataloader = pl.LightningModule.val_dataloader


def test_a_second_training_may_validate_where_the_first_does_not(tmp_path):
    """A start again begins with the first one, which has no data to validate with."""

    def train(folder, *callbacks: pl.Callback) -> list[torch.Tensor]:
        earlier_fits._finished.clear()  # as in a new process
        used = trainer(folder, *callbacks, max_epochs=1)
        used.fit(model := ValidatedLater())
        used.fit_loop.max_epochs = 3
        used.fit(model, val_dataloaders=Validated().val_dataloader())
        return [used.callback_metrics["error"], *model.state_dict().values()]

    alone = train(tmp_path / "alone")
    with interrupted():
        train(tmp_path / "run", At("batch 13", press_ctrl_c))
    assert all(map(torch.equal, train(tmp_path / "run"), alone))


def test_a_search_comes_again_in_another_training(tmp_path, monkeypatch):
    """A resumed run does not search again; the same callback may be used once more."""
    finder = LearningRateFinder(num_training_steps=2)
    searches = []
    monkeypatch.setattr(LearningRateFinder, "lr_find", lambda *_: searches.append(1))
    with interrupted():
        fit(tmp_path / "a", LearningRateFinder(num_training_steps=2), At("batch 2", press_ctrl_c))
    fit(tmp_path / "a", finder, At("never", fail), model=(model := Line()))
    assert len(searches) == 1
    fit(tmp_path / "b", finder, model=model)
    assert len(searches) == 2


def test_a_tuner_may_search_before_the_training(tmp_path):
    """Its run is not the training's: it saves nothing, and reads nothing."""
    weights = []
    for name, moments in (("alone", ["never"]), ("run", ["batch 2", "never"])):
        for moment in moments:
            earlier_fits._finished.clear()
            used = trainer(tmp_path / name, At(moment, press_ctrl_c))
            Tuner(used).lr_find(model := Line(), num_training=3, update_attr=False)
            assert model.line.weight.item() == 0.5
            assert [*saved(tmp_path / name)] == ([2] if (name, moment) == ("run", "never") else [])
            with nullcontext() if moment == "never" else interrupted():
                used.fit(model)
        weights.append(model.line.weight.item())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("first_steps", [12, 9])
def test_ckpt_path_is_where_a_run_begins(tmp_path, capfd, first_steps):
    """A run that began before continues with its own checkpoint, and says so."""
    path = tmp_path / "first.ckpt"
    saves = At(f"end of batch {first_steps}", lambda trainer: trainer.save_checkpoint(path))
    trainer(tmp_path / "first", saves, max_epochs=2).fit(Line())
    models = []
    for name in ("alone", "run"):
        if name == "run":
            with interrupted():
                stops = At("batch 15", press_ctrl_c)
                trainer(tmp_path / name, stops, max_epochs=3).fit(Line(), ckpt_path=path)
        capfd.readouterr()
        steps = []
        notes = At(
            "end of batch .*", lambda trainer, steps=steps: steps.append(trainer.global_step)
        )
        trainer(tmp_path / name, notes, max_epochs=3).fit(model := Line(), ckpt_path=path)
        assert steps == [*range(16 if name == "run" else first_steps + 1, 19)]
        says = (
            f"warning: {path} was not loaded: this run has checkpoints of its own, and continues "
            f"from the newest one in {tmp_path / name}"
        )
        assert (says in capfd.readouterr().out.splitlines()) is (name == "run")
        models.append(model)
    assert equal(*models) and 18 in saved(tmp_path / "run")


def test_an_evaluation_takes_the_checkpoint_that_it_is_given(tmp_path):
    """With its own folder, and another one. So does a training that saves nothing."""
    used = trainer(tmp_path, max_epochs=2)
    used.fit(Validated())
    used.save_checkpoint(path := tmp_path / "model.ckpt")
    weight = used.lightning_module.line.weight.item()
    for evaluates in (used, trainer(tmp_path / "another")):
        for evaluate in (evaluates.validate, evaluates.test):
            evaluate(other := Validated(), ckpt_path=path, verbose=False)
            assert other.line.weight.item() == weight
    steps = []
    notes = At("end of batch .*", lambda trainer: steps.append(trainer.global_step))
    trainer(tmp_path, notes, saves=False, max_epochs=3).fit(Validated(), ckpt_path=path)
    assert steps == [*range(13, 19)]


def test_another_training_in_the_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "lock", lambda folder, patience: f"process 7 of {folder.name}")
    says = (
        rf"\(dirpath={tmp_path}\): process 7 of {tmp_path.name} trains with these checkpoints now; "
    )
    with pytest.raises(UserError, match=says):
        fit(tmp_path)
    fit(tmp_path, saves=False)


def test_a_diverged_model_is_not_saved(tmp_path):
    """It is not validated either."""

    def spoil(trainer: pl.Trainer) -> None:
        trainer.lightning_module.line.weight.data.fill_(torch.nan)

    seen = []
    with pytest.raises(UserError, match="weights are NaN or infinite after step 4"):
        fit(tmp_path, At("end of batch 4", spoil), Divergence(), every_n_steps=4)
    with pytest.raises(UserError, match="weights are NaN or infinite after step 6"):
        callbacks = [At("end of batch 6", spoil), At("validation 0", seen.append), Divergence()]
        fit(tmp_path, *callbacks, model=Validated())
    assert saved(tmp_path) == {} and not seen


@pytest.mark.parametrize(
    ("order", "warnings"),
    [
        ("model, callback, fit", 1),
        ("seed, model, callback, fit", 0),
        ("callback, model, fit", 0),
        ("model, callback, callback, fit", 1),
        ("callback, model, callback, fit", 0),
        ("model, callback, fit, callback, fit", 2),
        ("callback, model, fit, model, callback, fit", 0),
        ("callback, model, fit that fails, model, callback, fit", 0),
        ("model, callback without seed, fit", 0),
        ("model, callback with a search, fit", 1),
        ("model, callback, callback without seed, fit", 0),
    ],
)
def test_a_model_that_nothing_seeds_is_named(tmp_path, monkeypatch, capfd, order, warnings):
    """Once a callback is made, what it and its training leave behind are seeds, too."""
    torch.seed()  # as a process begins
    used = None
    for number, what in enumerate(order.split(", ")):
        if what == "seed":
            torch.manual_seed(3)
        elif what == "model":
            model = Line()
        elif what == "fit":
            used.fit(model)
        elif what == "fit that fails":
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(model, "on_train_epoch_end", lambda: 1 / 0)
                used.fit(model)
        else:
            seed = None if what == "callback without seed" else 1
            others = [LearningRateFinder(num_training_steps=2)] if "search" in what else []
            used = trainer(tmp_path / f"{number}", *others, seed=seed, reseeds=False)
    warning = (
        "warning: ExactResume(seed=...): the model was made before this callback, and nothing was "
        "seeded: what it drew, such as its first weights, differs each time the program starts; "
        "make the callback first"
    )
    assert capfd.readouterr().out.splitlines().count(warning) == warnings


@pytest.mark.parametrize(
    ("problem", "is_first", "said"),
    [
        ("", True, ["short_trainings.Line.on_save_checkpoint is called for checkpoints alone"]),
        ("", False, [""]),
        ("there is no room", True, []),
    ],
)
def test_hooks_that_save_are_called_for_checkpoints_alone(monkeypatch, problem, is_first, said):
    """Then no copies are kept in memory, which one rank says, once."""
    hooks = SimpleNamespace(read=[(Line(), "on_save_checkpoint")])
    monkeypatch.setattr(lightning_checkpoints, "save_hooks", lambda trainer: hooks)
    given = []
    run = object.__new__(Run)
    run.copies = SimpleNamespace(problem=problem, give_up=given.append)
    run.trainer = SimpleNamespace(is_global_zero=is_first)
    run._leave_save_hooks_alone()
    assert given == said


def test_a_step_that_ends_its_epoch_by_stop_iteration_is_said_once(tmp_path, capsys):
    class Drained(Line):
        def __init__(self):
            super().__init__()
            self.scales = iter(range(1, 9))

        def training_step(self, batch, batch_idx):
            return next(self.scales) * super().training_step(batch, batch_idx)

    fit(tmp_path, model=Drained(), max_epochs=4)
    assert capsys.readouterr().out.count("epoch 1: training_step, or what it calls, raised") == 1


def test_an_epoch_that_a_hook_leaves_is_not_said(tmp_path, capsys):
    class Leaving(Line):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    fit(tmp_path, model=Leaving(), max_epochs=2)
    assert "StopIteration" not in capsys.readouterr().out


SCALE = [1.0]
ONES = []


@functools.lru_cache
def scaled(number):
    return SCALE[0] * number


@functools.lru_cache
def only_one():
    return object()


def test_results_of_before_the_restore_are_computed_again(tmp_path):
    class Scaling(Validated):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * scaled(1)

        def validation_step(self, batch, batch_idx):
            scaled(1)
            ONES.append(only_one())
            return super().validation_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            SCALE[0] += 1.0
            scaled.cache_clear()

    def start(*stops):
        SCALE[0] = 1.0
        scaled.cache_clear()
        ONES.clear()
        only_one.cache_clear()
        return fit(tmp_path / "run", *stops, model=Scaling(), max_epochs=2)

    SCALE[0] = 1.0
    alone = fit(tmp_path / "alone", model=Scaling(), max_epochs=2)
    with failed():
        start(At("batch 8", fail))
    assert equal(start(), alone)  # from the epoch's end, where Lightning checks before training
    assert only_one() is ONES[-1]


class Budget(pl.Callback):
    """Counts batches; it adds to what it was loaded with."""

    def __init__(self) -> None:
        self.mine = self.before = 0

    def on_train_batch_end(self, *_):
        self.mine += 1

    def state_dict(self):
        return {"total": self.before + self.mine}

    def load_state_dict(self, state):
        self.before, self.mine = state["total"], 0


def test_what_a_callback_moves_while_it_loads_is_counted_once(tmp_path):
    with interrupted():
        fit(tmp_path, Budget(), At("batch 4", press_ctrl_c), max_epochs=2)
    budget = Budget()
    fit(tmp_path, budget, max_epochs=2)
    assert (budget.before, budget.mine) == (0, 12)


class Counted(IterableDataset):
    """Counts its samples, and saves how many there were."""

    total = 0

    def __iter__(self):
        for _ in range(3):
            self.total += 1
            yield torch.tensor([float(self.total)])

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Numbered(nodes.BaseNode):
    """Counts on from one iteration to the next."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.left = 3
        self.total = initial_state["total"] if initial_state else self.total

    def next(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        self.total += 1
        return torch.tensor([float(self.total)])

    def get_state(self):
        return {"total": self.total}


@pytest.mark.parametrize(
    "make", [lambda: StatefulDataLoader(Counted()), lambda: nodes.Loader(Numbered())]
)
def test_validation_loaders_with_a_state_continue(tmp_path, make):
    class Counting(Line):
        def __init__(self):
            super().__init__()
            self.seen = []

        def validation_step(self, batch, batch_idx):
            self.seen += batch.flatten().tolist()

        def val_dataloader(self):
            return make()

    alone = fit(tmp_path / "alone", model=Counting(), max_epochs=3)
    with interrupted():
        fit(tmp_path / "run", At("batch 8", press_ctrl_c), model=Counting(), max_epochs=3)
    resumed = fit(tmp_path / "run", model=Counting(), max_epochs=3)
    assert resumed.seen == alone.seen and len(alone.seen) > 8


def test_a_loop_of_the_users_own_is_named(tmp_path, capsys):
    class OwnLoop(_FitLoop):
        pass

    used = trainer(tmp_path)
    used.fit_loop.__class__ = OwnLoop
    used.fit(Line())
    assert "OwnLoop, a loop of your own, is replaced by one" in capsys.readouterr().out
