"""ExactResume in trainings of a few batches: how it leaves the process, and what it refuses.

They run in this process and take some hundredths of a second each.
"""

import csv
import json
import os
import re
import signal
import threading
from contextlib import nullcontext
from logging.handlers import BufferingHandler
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from pytorch_lightning.trainer.states import TrainerFn
from short_trainings import (
    At,
    Line,
    Validated,
    fail,
    failed,
    fit,
    interrupted,
    press_ctrl_c,
    resume_of,
    saved,
    trainer,
)
from torch._dynamo import config as dynamo

from sagemaker_lightning import ExactResume, SageMakerEnvironment, UserError
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.drill import drilled_run
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import callback
from sagemaker_lightning.resume.files import checkpoint_dir, checkpoint_file, folder_lock
from sagemaker_lightning.resume.files.best_model import BestModel


def process() -> dict[str, object]:
    """Return what a training changes in this process."""
    return {
        "entropy": np.random.bit_generator.randbits,
        "kernels": dynamo.recompile_limit,
        "signals": [signal.getsignal(number) for number in shutdown.SIGNALS],
        "locked": [*folder_lock._held],
    }


@pytest.mark.parametrize(
    ("moment", "happens"),
    [
        ("never", fail),
        ("batch 2", fail),
        ("batch 2", press_ctrl_c),
        ("check 0", fail),
        ("validation 0", press_ctrl_c),
    ],
)
def test_the_process_is_left_as_it_was(tmp_path, moment, happens):
    """Whether the training ends, fails or is stopped."""
    during = []
    notes = At("check 0|batch 1", lambda trainer: during.append(process()))
    before = process()
    used = trainer(tmp_path, notes, At(moment, happens))
    with nullcontext() if moment == "never" else pytest.raises((SystemExit, RuntimeError)):
        used.fit(model := Validated())
    assert process() == before
    for seen in during:
        assert all(seen[name] != before[name] for name in before)
        assert seen["locked"] == [tmp_path]
    used.callbacks[:] = [each for each in used.callbacks if type(each) is not At]
    used.fit(model)
    assert process() == before and type(used.fit_loop) is _FitLoop


def test_a_run_says_two_lines_where_it_resumes_and_none_before(tmp_path, monkeypatch):
    """A handler of the user's gets them, at the level INFO."""
    monkeypatch.setattr(log, "handlers", [heard := BufferingHandler(100)])
    with interrupted():
        fit(tmp_path, At("batch 3", press_ctrl_c), model=Validated(), max_epochs=2)
    assert heard.buffer == []
    fit(tmp_path, model=Validated(), max_epochs=2)
    assert [record.levelname for record in heard.buffer] == ["INFO", "INFO"]
    first, second = (record.getMessage() for record in heard.buffer)
    assert first == f"resuming from step 3: {tmp_path / 'step-000000003.ckpt'}"
    assert re.fullmatch(r"resumed at step 3: .* bit for bit", second)


def test_a_training_of_no_batch_leaves_the_process_as_it_was(tmp_path):
    """There is the check before training."""
    before = process()
    fit(tmp_path, model=Validated(), limit_train_batches=0)
    assert process() == before and saved(tmp_path) == {}


def test_an_evaluation_after_a_training_is_as_deterministic_as_that(tmp_path):
    """It leaves the process as it was, too, and what is known of the training."""
    during = []
    with interrupted():
        fit(tmp_path, At("batch 2", press_ctrl_c), model=Validated())
    used = trainer(tmp_path, At("test 0", lambda trainer: during.append(process())))
    used.fit(model := Validated())
    before = process()
    results = resume_of(used).resumes
    used.test(model, verbose=False)
    assert process() == before and len(results) == 1
    assert resume_of(used).resumes == results
    (seen,) = during
    assert seen["entropy"] != before["entropy"] and seen["kernels"] != before["kernels"]
    assert seen["locked"] == []


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_test_that_is_stopped_ends_with_the_status_of_the_signal(tmp_path, is_trained):
    """With Lightning alone, it is 0, as if the test had ended."""
    used = trainer(tmp_path, At("test 0", lambda trainer: os.kill(os.getpid(), signal.SIGTERM)))
    model = Validated()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the tests' own
    try:
        if is_trained:
            used.fit(model)
        with pytest.raises(SystemExit) as ended:
            used.test(model, verbose=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_training_that_is_not_exact_changes_nothing(tmp_path, capfd):
    """Its loader is the user's own, as Lightning uses it."""

    class Loads(Validated):
        def train_dataloader(self):
            self.loader = super().train_dataloader()
            return self.loader

    def note(trainer: pl.Trainer) -> None:
        during.append(process())
        loaders.append(trainer.train_dataloader)
        loops.append(type(trainer.fit_loop))

    during, loaders, loops = [], [], []
    before = process()
    model = fit(tmp_path, At("batch 1", note), model=Loads(), exact=False)
    assert loops == [_FitLoop] and loaders == [model.loader]
    assert [during[0][name] for name in ("kernels", "locked")] == [before["kernels"], []]
    assert during[0]["signals"][1] == before["signals"][1] and process() == before
    says = "this run is trained and saved as Lightning does; an interruption makes it start over\n"
    assert capfd.readouterr().out == says


@pytest.fixture
def may_write(monkeypatch) -> threading.Event:
    """Checkpoints are written when this event is set."""
    event = threading.Event()

    def write(path: Path, checkpoint: dict, step: int, number: int) -> None:
        event.wait(5)
        checkpoint_file.write(path, checkpoint, step, number)

    monkeypatch.setattr(checkpoint_dir, "write", write)
    return event


def test_a_training_that_fails_waits_for_the_checkpoint_that_is_being_written(tmp_path, may_write):
    class Fails(pl.Callback):
        def on_exception(self, *_):
            threading.Timer(0.02, may_write.set).start()

    with failed():
        fit(tmp_path, Fails(), At("batch 4", fail), every_n_steps=3)
    assert saved(tmp_path) == {3: "batch"}


def test_other_callbacks_find_the_last_checkpoint_at_the_end_of_the_training(tmp_path, may_write):
    """It is on the disk then, however long that takes."""

    class Looks(pl.Callback):
        def on_train_epoch_end(self, *_):
            threading.Timer(0.02, may_write.set).start()

        def on_train_end(self, *_):
            found.update(saved(tmp_path))

    found: dict[int, str] = {}
    fit(tmp_path, Looks())
    assert found == {6: "epoch"}


@pytest.mark.parametrize("stops", [True, False])
def test_what_is_logged_by_hand_after_a_training_is_kept(tmp_path, stops):
    """And what an evaluation logs."""
    logger = CSVLogger(tmp_path / "logs", version=0)
    callbacks = [At("batch 2", press_ctrl_c)] if stops else []
    model = Validated()
    used = trainer(tmp_path, *callbacks, logger=logger)
    with interrupted() if stops else nullcontext():
        used.fit(model)
    if not stops:
        used.test(model, verbose=False)
    logger.log_metrics({"mine": 1.0}, step=1)
    fit(tmp_path, model=model, logger=logger, max_epochs=2)
    path = tmp_path / "logs/lightning_logs/version_0/metrics.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows if row["mine"]] == ["1"]
    assert [row["step"] for row in rows if row["loss"]] == [str(step) for step in range(12)]


def test_an_evaluation_in_a_new_process_continues_in_the_log(tmp_path):
    logs = tmp_path / "logs"
    fit(tmp_path / "run", logger=CSVLogger(logs))
    used = trainer(tmp_path / "run", logger=CSVLogger(logs))
    used.validate(Validated(), verbose=False)
    used.test(Validated(), verbose=False)
    (path,) = logs.rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [bool(row["error"]) for row in rows] == [False] * 6 + [True] * 2


class WritesConfig(SaveConfigCallback):
    def save_config(self, *_):
        pass


@pytest.mark.parametrize(("ends", "ending"), [(press_ctrl_c, interrupted), (fail, failed)])
def test_a_command_lines_config_is_written_again_at_the_next_start(tmp_path, ends, ending):
    """With a checkpoint, and without one."""
    for overwrites in (False, True):
        writer = WritesConfig(None, None, save_to_log_dir=False)
        with nullcontext() if overwrites else ending():
            fit(tmp_path, writer, At(f"batch {'99' if overwrites else 1}", ends))
        assert writer.overwrite is overwrites


@pytest.mark.parametrize(
    ("kind", "is_command_line", "plain"),
    [(ModelCheckpoint, False, False), (BestModel, False, True), (ModelCheckpoint, True, True)],
)
def test_a_model_file_has_what_its_reader_can_read(tmp_path, kind, is_command_line, plain):
    """The command line reads its own without running code in them."""
    model = Line()
    model.save_hyperparameters({"path": tmp_path})
    options = {"enable_checkpointing": True}
    home = CheckpointHome(tmp_path)
    with shutdown.Stop(home, print) if is_command_line else nullcontext() as stop:
        fit(tmp_path / "run", kind(tmp_path, "model"), model=model, stop=stop, **options)
    read = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert (read["hyper_parameters"]["path"] == tmp_path) is not plain


class Averaged(Line):
    """Puts something in place of its weights into each checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["optimizer_states"]
        checkpoint["state_dict"] = {"average": torch.ones(2)}


@pytest.mark.parametrize("saves", [True, False])
def test_the_best_model_has_no_states_of_optimizers(tmp_path, saves):
    """The checkpoints to resume from have them: SageMaker uploads a third of the bytes.

    What hooks do to a model file is in it.
    """
    best = BestModel(tmp_path, "model")
    fit(tmp_path / "run", best, model=Averaged(), saves=saves, enable_checkpointing=True)
    read = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert list(read["state_dict"]) == ["average"]
    assert ("optimizer_states" in read) is not saves


@pytest.mark.parametrize(
    ("rank", "torchrun", "status"), [(0, False, 130), (0, True, 130), (1, True, 130), (1, False, 0)]
)
def test_lightning_would_take_a_stopped_rank_for_a_crash(
    tmp_path, monkeypatch, capfd, rank, torchrun, status
):
    """One rank of a host writes, and says that it stops."""

    def begin(trainer: pl.Trainer) -> None:
        monkeypatch.setattr(pl.Trainer, "local_rank", rank)
        press_ctrl_c(trainer)

    environment = SageMakerEnvironment(torchrun=torchrun)
    with interrupted(status):
        fit(tmp_path, At("batch 2", begin), environment=environment)
    assert saved(tmp_path) == ({} if rank else {2: "batch"})
    assert capfd.readouterr().err.count("interrupted, resume from step 2: SIGINT; ") == 1 - rank


FSDP2 = (
    "whose runs cannot be resumed; expected .*; for a model that does not fit one device, use "
    r"ModelParallelStrategy, which is FSDP2, and call fully_shard\(\) in configure_model\(\)$"
)


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        (
            DDPStrategy,
            {},
            r"^Trainer\(strategy=...\): found DDPStrategy, which copies this process, .*program of "
            "its own$",
        ),
        *(
            (strategy, {"settings": settings}, rf"^{flag}: found {strategy.__name__}, {FSDP2}")
            for strategy in (FSDPStrategy, DeepSpeedStrategy)
            for flag, settings in (
                (r"Trainer\(strategy=...\)", {}),
                ("--trainer.strategy", {"--trainer.strategy": "any"}),
            )
        ),
        (FSDPStrategy, {"saves": False}, ""),
        (DeepSpeedStrategy, {"saves": False}, ""),
    ],
)
def test_a_strategy_whose_runs_cannot_be_resumed_is_one_line(
    tmp_path, monkeypatch, capfd, strategy, options, says
):
    """Unless nothing is saved: it trains as Lightning does, then."""
    used = trainer(tmp_path, **options)
    used.state.fn = TrainerFn.FITTING
    resume = resume_of(used)
    if strategy is FSDPStrategy:
        other = FSDPStrategy()
    else:
        other = DDPStrategy(start_method="spawn" if strategy is DDPStrategy else "popen")
        other.__class__ = strategy  # DeepSpeed's own constructor needs its package
    used._accelerator_connector.strategy = other
    resume.run_begins(used)
    with pytest.raises(UserError, match=says) if says else nullcontext():
        resume.setup(used, Line(), "fit")
    resume.changed.close()
    said = capfd.readouterr().out
    assert said.startswith("this run is trained and saved as Lightning does") == (says == "")


class Sharding(Line):
    def configure_model(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Line, r"Line: found no configure_model\(\), expected one that shards the model, as"),
        (Sharding, "expected two numbers whose product is 1, the number of ranks"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused_before_the_ranks_connect(
    tmp_path, model, expected
):
    used = trainer(tmp_path)
    used.state.fn = TrainerFn.FITTING
    strategy = ModelParallelStrategy(3, 1)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.connect(model())
    used._accelerator_connector.strategy = strategy
    resume = resume_of(used)
    with pytest.raises(UserError, match=expected):
        resume.run_begins(used)
    resume.changed.close()


TWO_HOSTS = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-2"}


def test_the_hosts_of_a_job_are_joined_unless_that_is_done(tmp_path, monkeypatch):
    """When a run of several begins, and not before: nothing waits while the callback is made."""
    joined = []
    monkeypatch.setattr(callback.rendezvous, "join", lambda *given: joined.append(given))
    fit(tmp_path / "alone", max_epochs=1)
    monkeypatch.setattr(pl.Trainer, "num_nodes", 2)
    fit(tmp_path / "done", environment=SageMakerEnvironment(), max_epochs=1)
    ours = trainer(tmp_path / "ours")
    assert joined == []
    ours.fit(Line())
    assert joined == [(SageMakerEnvironment.read(), os.environ)]


def test_making_the_callback_tells_no_host_where_it_is(tmp_path, monkeypatch):
    """It names this process, for the ranks that Lightning starts before any hook, and no more."""
    monkeypatch.delenv(parent_process.LAUNCHER_VARIABLE, raising=False)
    environment = SageMakerEnvironment(**TWO_HOSTS)
    monkeypatch.setattr(callback.SageMakerEnvironment, "read", lambda: environment)
    before = dict(os.environ)
    ExactResume(tmp_path)
    assert dict(os.environ) == before | {parent_process.LAUNCHER_VARIABLE: f"{os.getpid()}"}


class OfUser(ClusterEnvironment):
    """A plugin that knows where this host is."""

    creates_processes_externally = True
    main_address = "algo-1"
    main_port = 1
    detect = staticmethod(lambda: True)
    world_size = local_rank = node_rank = global_rank = lambda self: 0
    set_world_size = set_global_rank = lambda self, number: None


@pytest.mark.parametrize(
    ("variables", "nodes", "plugins", "is_refused"),
    [
        ({}, 2, [], True),
        ({"NODE_RANK": "1"}, 2, [], True),
        ({"NODE_RANK": "1", "MASTER_ADDR": "algo-1"}, 2, [], False),
        ({}, 1, [], False),
        ({}, 2, [OfUser()], False),
    ],
)
def test_a_host_that_does_not_know_its_place_is_one_line(
    tmp_path, monkeypatch, variables, nodes, plugins, is_refused
):
    """As a run begins, before the hosts wait for each other."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(callback.rendezvous, "join", lambda *_: None)
    environment = SageMakerEnvironment(**TWO_HOSTS)
    monkeypatch.setattr(callback.SageMakerEnvironment, "read", lambda: environment)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # the trainer sets it
    used = trainer(tmp_path, strategy="ddp", num_nodes=nodes, plugins=plugins)
    says = r"^Trainer\(num_nodes=...\): found 2 hosts, and no .*NODE_RANK|MASTER_ADDR.* on algo-2"
    with pytest.raises(UserError, match=says) if is_refused else nullcontext():
        resume_of(used).run_begins(used)
    resume_of(used).changed.close()


def test_a_drill_records_a_training_once(tmp_path, monkeypatch):
    monkeypatch.setattr(drilled_run, "_has_trained", [])
    asked = {"folder": f"{tmp_path}", "reached": f"{tmp_path / 'reached'}", "epochs": 1}
    asked |= {"steps": 3, "moment": None, "workers": None}
    environment = SageMakerEnvironment(drill=asked, checkpoint_dir=tmp_path / "run")
    drilled = drilled_run.Drilled(asked)
    fit(Path("unused"), drilled, environment=environment, max_epochs=3)
    assert saved(tmp_path / "run") == {2: "batch", 3: "epoch"}
    kinds = [json.loads(line)["at"][0] for line in (tmp_path / "steps-0.jsonl").open()]
    assert kinds == ["start", "batch", "batch", "batch", "epoch", "end"]


def test_scripted_parts_are_not_optimized_by_their_first_runs(tmp_path):
    """A resumed run has first runs again, whose bits may be others."""
    flags = []

    class Scripted(Line):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(torch.nn.Linear(2, 1))

        def on_train_start(self):
            flags.append(torch._C._get_graph_executor_optimize())

    trainer(tmp_path, max_epochs=1).fit(Scripted())
    flags.append(torch._C._get_graph_executor_optimize())
    assert flags == [False, True]
