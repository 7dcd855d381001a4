"""A checkpoint is input: a forged one, with a right checksum, decides values and nothing else.

Each test interrupts a training, forges its newest checkpoint, and starts the training again.
test_optimizers_forged.py and test_checkpoint_file_forged.py have more.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import nightly
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from forged import (
    ENTRIES,
    expanded,
    forge,
    little_memory,  # noqa: F401  the fixture bounded
    rewrite,
    state_of_rank,
)
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.callbacks.spike import SpikeDetection
from pytorch_lightning.loggers import CSVLogger
from short_fits import Noted, as_in_a_new_process, interrupted, trainer
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from sagemaker_lightning.callbacks.loggers import prepare_files
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.resume.parts import PARTS
from sagemaker_lightning.resume.parts.part import Place
from sagemaker_lightning.state.graph import values

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def add_node(content: dict, *node: object) -> list:
    """Add a node to what a checkpoint has of the user's objects, and return a reference to it."""
    graph = state_of_rank(content)["user_objects"]["graph"]
    nodes = json.loads(graph["nodes"])
    nodes.append(list(node))
    graph["nodes"] = json.dumps(nodes)
    return [len(nodes) - 1]


def set_attributes(content: dict, path: str, values: dict) -> None:
    """Have a checkpoint set attributes of the object at a path, and do nothing else with it."""
    graph = state_of_rank(content)["user_objects"]["graph"]
    nodes = json.loads(graph["nodes"])
    nodes = [
        ["list", "nothing", None, [], None] if node[:2] == ["object", path] else node
        for node in nodes
    ]
    graph["nodes"] = json.dumps(nodes)
    note = {"names": list(values)}
    add_node(content, "object", path, note, list(values.values()), None)


# Files --------------------------------------------------------------------------------------------


def best(folder: Path) -> BestModel:
    return BestModel(folder, monitor="loss_epoch", filename="best-{epoch}", save_last=True)


def each_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="loss", every_n_train_steps=1, save_last=True)


def newest_one(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)


@pytest.fixture(scope="module")
def interrupted_with(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that returns the folder of a training with models, once interrupted."""
    runs: dict[Callable, tuple[Path, Path]] = {}

    def made(kind: Callable) -> Path:
        if kind not in runs:
            folder = tmp_path_factory.mktemp(kind.__name__)
            with interrupted():
                train(folder / "a/run", kind(folder / "a/run/models"), stop="batch 1:1")
            runs[kind] = folder / "a", folder / "kept"
            shutil.copytree(*runs[kind])
        folder, kept = runs[kind]
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        return folder / "run"

    return made


def train(folder: Path, *callbacks: pl.Callback, **events: str) -> None:
    training = trainer(folder, *callbacks, enable_checkpointing=True, logger=False)
    as_in_a_new_process()
    training.fit(Noted(**events))


FOLDERS = "{0}/..", "{0}", "{0}/sub", "{0}/link", "{0}/sub/../.."
FILES = (
    "{0}/../precious.ckpt",
    "{0}/sub/precious.ckpt",
    "{0}/precious.ckpt",
    "{0}/notes.txt",
    "{0}/link/precious.ckpt",
    "{0}/step-000000001.ckpt",
    "{0}/sub/best-epoch=0.ckpt",
)
URLS = "local://{0}/precious.ckpt", "local://{0}/sub"


@pytest.mark.parametrize("path", FOLDERS + FILES + URLS)
@pytest.mark.parametrize("kind", nightly.all_but([best], [best, each_step, newest_one]))
def test_a_checkpoint_names_no_file_and_no_folder_to_remove(interrupted_with, kind, path):
    """What is no longer a best model is removed; Lightning would remove a folder, too."""
    run = interrupted_with(kind)
    folder = run / "models"
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(run)
    precious = [Path(file.format(folder)) for file in FILES]
    for file in precious:
        file.write_text("precious")
    path = path.format(folder)

    def change(content: dict) -> None:
        state = content["callbacks"][kind(folder).state_key]
        state |= dict.fromkeys(("kth_best_model_path", "last_model_path", "best_model_path"), path)
        state |= {"best_k_models": {path: torch.tensor(99.0)}, "kth_value": torch.tensor(99.0)}
        state["retired"] = {path: 9}

    forge(run, change)
    train(run, kind(folder))
    assert [file.read_text() for file in precious] == ["precious"] * len(precious)
    assert sorted(run.glob("step-*.ckpt")) and list(folder.glob("*epoch=1*.ckpt"))


# Attributes ---------------------------------------------------------------------------------------


class Warmup:
    """Decides a learning rate, and remembers what it has decided."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0


class Measured(Noted):
    """Has metrics, a schedule of several parts, and a method that a callback replaces."""

    def __init__(self, stop: str = "") -> None:
        super().__init__(stop)
        self.lr = 0.1
        self.mean = torchmetrics.MeanMetric()
        self.sum = torchmetrics.SumMetric()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.SumMetric(), maximize=False)

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.sum.update(loss.detach())
        self.tracker.update(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        self.warmup = Warmup()
        parts = [LambdaLR(optimizer, self.warmup), StepLR(optimizer, 1)]
        return [optimizer], [SequentialLR(optimizer, parts, [1])]


class Naming(pl.Callback):
    """Has a folder of the user's in an attribute that changes."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs += 1


class Run:
    """A training of a Measured with callbacks that write files."""

    def __init__(self, folder: Path, stop: str = "") -> None:
        as_in_a_new_process()
        self.model = Measured(stop)
        self.best = best(folder / "models")
        self.spikes = SpikeDetection(warmup=10**6, exclude_batches_path=str(folder / "own.json"))
        self.naming = Naming()
        callbacks = self.naming, self.spikes, self.best
        self.trainer = trainer(folder, *callbacks, enable_checkpointing=True, logger=False)
        self.strategy = self.trainer.strategy

    def fit(self) -> None:
        self.trainer.fit(self.model)


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory) -> Callable[[], Path]:
    """Return a function that returns the folder of a `Run`, once interrupted."""
    folder = tmp_path_factory.mktemp("measured")
    with interrupted():
        Run(folder / "run", "batch 1:1").fit()
    shutil.copytree(folder / "run", folder / "kept")

    def again() -> Path:
        shutil.rmtree(folder / "run")
        shutil.copytree(folder / "kept", folder / "run")
        return folder / "run"

    return again


def set_of_callback(content: dict, name: str, values: dict) -> None:
    """Have a checkpoint set attributes of a callback, wherever it is among the callbacks."""
    for n in range(12):
        set_attributes(content, f"callbacks.{n} {name}", values)


def test_a_checkpoint_sets_no_attribute_that_it_would_not_have_saved(interrupted_run):
    """Such as the folder and the ending of the models, which would overwrite any file."""
    run = interrupted_run()
    precious = run / "elsewhere/best-epoch=1.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    names = {"dirpath": str(precious.parent), "FILE_EXTENSION": ".txt", "save_top_k": -1}
    names |= {"filename": "../elsewhere/best", "CHECKPOINT_NAME_LAST": "../x", "save_last": True}
    names |= {"write": 5, "state_key": "other", "monitor": "other", "keeps_retired": 5}
    of_model = {"line": 5, "training_step": 5, "trainer": 5, "_trainer": 5, "mean": 5}
    of_model |= {"automatic_optimization": False, "__class__": 5, "named_parameters": 5}
    of_model |= {"forward": "text", "module line": 5, "parameter a": 5, "buffer b": 5}
    of_trainer = {"fit": 5, "strategy": 5, "_default_root_dir": "/", "loggers": 5}

    def change(content: dict) -> None:
        empty_dict = add_node(content, "dict", None, None, [], None)
        empty_list = add_node(content, "list", None, None, [], None)
        method = add_node(content, "method", None, "on_train_end", [["at", "model"]], None)
        dicts = dict.fromkeys(("_modules", "_parameters", "__dict__"), empty_dict)
        set_of_callback(content, "BestModel", names)
        set_of_callback(content, "SpikeDetection", {"exclude_batches_path": "/x", "mode": 5})
        set_of_callback(content, "RankConsistency", {"scaling": 5, "on_train_end": 5})
        set_of_callback(content, "Naming", {"on_train_end": 5, "__class__": 5, "epochs": 2})
        set_attributes(content, "model", of_model | dicts)
        set_attributes(content, "trainer", of_trainer | {"callbacks": empty_list, "test": method})
        set_attributes(content, "optimizers.0", dict.fromkeys(("step", "param_groups", "state"), 5))
        set_attributes(content, "model.sum", dict.fromkeys(("update", "_computed", "sum_value"), 5))

    forge(run, change)
    again = Run(run)
    again.fit()
    assert again.best.dirpath == str(run / "models") and again.best.FILE_EXTENSION == ".ckpt"
    assert (again.best.filename, again.best.save_top_k) == ("best-{epoch}", 1)
    assert again.spikes.exclude_batches_path == str(run / "own.json")
    assert again.trainer.strategy is again.strategy and again.model.trainer is again.trainer
    assert again.trainer.loggers == [] and again.model.sum.compute() > 0
    assert isinstance(again.model.line, torch.nn.Linear)
    assert [type(again.naming), again.naming.epochs] == [Naming, 2]
    assert precious.read_text() == "precious" and not (run / "elsewhere/best.txt").exists()
    for owner in (again.model, again.trainer, again.best, again.naming):
        assert [
            name for name, value in vars(owner).items() if type(value) is int and value == 5
        ] == []


def test_what_a_checkpoint_says_of_a_trainer_are_values_of_its_settings(interrupted_run):
    run = interrupted_run()
    settings = dict.fromkeys(("strategy", "fit_loop", "callbacks", "logger", "new", "fit"), "x")
    settings |= {"_default_root_dir": "/", "default_root_dir": "/", "limit_val_batches": [5]}
    settings |= {"log_every_n_steps": 7}
    forge(run, lambda content: state_of_rank(content)["trainer_settings"].update(settings))
    again = Run(run)
    again.fit()
    assert again.trainer.strategy is again.strategy and not hasattr(again.trainer, "new")
    assert again.trainer.default_root_dir == str(run) and again.trainer.limit_val_batches == 1.0
    assert again.trainer.log_every_n_steps == 7  # that is one
    assert "x" not in map(str, vars(again.trainer).values())


def test_a_scheduler_gets_what_it_saves(interrupted_run):
    """And so do the schedulers, and the user's object, that it is made of."""
    run = interrupted_run()

    def change(content: dict) -> None:
        (state,) = content["lr_schedulers"]
        outer, inner = state["_schedulers"][0], state
        for each in (outer, inner, state["_schedulers"][1]):
            each |= {"optimizer": 5, "step": 5, "get_last_lr": 5, "__class__": 5, "added": 6}
        outer["lr_lambdas"] = [{"__call__": 5, "__class__": 5, "calls": 9, "added": 6}]
        state["_schedulers"].append({"step": 5})

    forge(run, change)
    again = Run(run)
    again.fit()
    scheduler = again.trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.optimizer is again.trainer.optimizers[0] and scheduler.added == 6
    assert 5 not in vars(scheduler).values() and again.model.warmup.added == 6
    assert again.model.warmup.calls >= 9 and 5 not in vars(again.model.warmup).values()


def test_a_metric_gets_its_states(interrupted_run):
    run = interrupted_run()

    def change(content: dict) -> None:
        state = state_of_rank(content)
        for saved in state["metrics"]["states"].values():
            saved["states"] |= {"compute": 5, "update": 5, "_defaults": {}, "reset": 5}
        for saved in state["epoch_sums"].values():
            saved["state"]["states"] = saved["state"].get("states", {}) | {"compute": 5}
            saved["defaults"] = {**saved["defaults"], "other": torch.ones(1)}

    forge(run, change)
    again = Run(run)
    again.fit()
    assert again.model.sum.update_count == 8 and 5 not in vars(again.model.sum).values()


@pytest.mark.parametrize("name", ["save", "from_file", "exit", "__name__", 5, None])
def test_what_was_logged_is_reduced_by_no_other_function(interrupted_run, name):
    """It is named in the file; Lightning knows four."""
    run = interrupted_run()

    def change(content: dict) -> None:
        for saved in state_of_rank(content)["epoch_sums"].values():
            saved |= {"reduce": name, "metric_attribute": "trainer.fit"}

    forge(run, change)
    Run(run).fit()


def test_the_loops_get_counters(interrupted_run):
    run = interrupted_run()

    def change(content: dict) -> None:
        loop = content["loops"]["fit_loop"]
        loop["epoch_progress"] |= {"reset": 5, "increment_ready": 5, "__class__": 5}
        loop["epoch_progress"]["total"] |= {"reset": 5}
        loop["epoch_loop.batch_progress"] |= {"reset_on_run": 5, "is_last_batch": "text"}
        loop["epoch_loop.batch_progress"]["current"] |= {"reset": 5}

    forge(run, change)
    again = Run(run)
    again.fit()
    assert again.trainer.global_step == 8


class Interrupting(pl.Callback):
    """Presses Ctrl-C in a training, and not in the search before it."""

    def on_train_batch_start(self, *_):
        os.kill(os.getpid(), signal.SIGINT)


class Searching(Noted):
    """Has a learning rate that is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.filterwarnings("ignore")
def test_the_result_of_a_search_is_a_number_in_the_attribute_that_was_searched_for(tmp_path):
    def search() -> LearningRateFinder:
        return LearningRateFinder(num_training_steps=5)

    options = {"max_epochs": 1, "enable_checkpointing": True, "logger": False}
    with interrupted():
        trainer(tmp_path, search(), Interrupting(), **options).fit(Searching())
    forged = {"trainer": 5, "line": 5, "training_step": 5, "lr": 0.25}
    forge(tmp_path, lambda content: content[ENTRIES]["parts"].update(search_results=forged))
    trainer(tmp_path, search(), **options).fit(model := Searching())
    assert model.lr == 0.25 and 5 not in vars(model).values()
    as_in_a_new_process()
    forged = {"lr": "text"}
    forge(tmp_path, lambda content: content[ENTRIES]["parts"].update(search_results=forged))
    trainer(tmp_path, search(), **options).fit(model := Searching())
    assert model.lr == 0.1


def test_a_callback_writes_to_no_file_that_a_checkpoint_names(interrupted_run):
    run = interrupted_run()
    other = {"bad_batches_path": str(run / "other.json"), "bad_batches": [1]}
    forge(run, lambda content: content["callbacks"]["SpikeDetection"].update(other))
    again = Run(run)
    again.fit()
    assert again.spikes.exclude_batches_path == str(run / "own.json")


def test_what_hooks_have_replaced_is_loaded_as_lightnings_entries_are(interrupted_run):
    run = interrupted_run()
    spikes = {"bad_batches_path": str(run / "other.json"), "bad_batches": [1]}

    def change(content: dict) -> None:
        callbacks = content["callbacks"]
        callbacks = callbacks | {"SpikeDetection": callbacks["SpikeDetection"] | spikes}
        content[checkpoint_file.BEFORE_HOOKS]["callbacks"] = callbacks
        path = checkpoint_file.BEFORE_HOOKS, "callbacks", "SpikeDetection", "bad_batches"
        content[ENTRIES]["exact_values"]["users"] = values.encode({path: [5]})

    forge(run, change)
    again = Run(run)
    again.fit()
    assert again.spikes.exclude_batches_path == str(run / "own.json")
    assert again.spikes.bad_batches == [1]


MODEL = {"model": pl.LightningModule()}


@pytest.mark.parametrize("record", ["lightnings", "users"])
@pytest.mark.parametrize("path", [(), ("callbacks", "SpikeDetection", "mode")])
def test_no_entry_of_lightnings_becomes_an_object_of_the_program(interrupted_run, record, path):
    run = interrupted_run()
    forged = {record: values.encode({path: MODEL["model"]}, MODEL)}
    forge(run, lambda content: content[ENTRIES]["exact_values"].update(forged))
    again = Run(run)
    is_left_out = record == "users" and path
    says = "found entries that this program does not write|which this program does not have"
    with contextlib.nullcontext() if is_left_out else pytest.raises(UserError, match=says):
        again.fit()
    assert not is_left_out or again.spikes.mode == "min"


KEYS = {part.key: part.place for part in PARTS}
OF_LIGHTNING = [key for key, place in KEYS.items() if place is Place.LIGHTNING]


def forms(where: str, keys: list[str], always: list, at_night: list) -> list:
    """Return cases of a place in a checkpoint: each key, with each value in place of its own."""
    return [
        pytest.param(where, key, value, marks=() if value in always else pytest.mark.thorough)
        for key in keys
        for value in always + at_night
    ]


ENTRY_KEYS = ["step", "resume_point", "number", "seed", "world_size", "run", "journal", "resumes"]
ENTRY_KEYS += ["exact_values", "parts", "ranks"]
PART_KEYS = [key for key in KEYS if key not in OF_LIGHTNING]
LOADER_KEYS = ["order", "data", "now", "draw", "begun", "within", "own"]
SCREENS = "\x1b[2J\n" * 200


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        *forms("entry", ENTRY_KEYS, [10**30, SCREENS], [None, 5, -1, 0.5, [5], {"a": 5}]),
        *forms("part", PART_KEYS, [{"a": 5}], [5, "text", [5]]),
        *forms("loader", LOADER_KEYS, [-1], [None, 5, "text", {"a": 5}]),
    ],
)
def test_an_entry_of_another_form_ends_the_run_with_a_line_or_is_ignored(
    interrupted_run, capfd, where, key, value
):
    """Some are used only with another number of ranks, say."""
    run = interrupted_run()

    def change(content: dict) -> None:
        saved = content[ENTRIES]
        if where == "part":
            saved = saved["parts"] if key in saved["parts"] else state_of_rank(content)
        elif where == "loader":
            (saved,) = state_of_rank(content)["loader_positions"]["loaders"]
        assert where == "part" or key in saved
        saved[key] = value

    forge(run, change)
    again = Run(run)
    with contextlib.suppress(UserError):
        again.fit()
        assert again.trainer.current_epoch == 2
    assert "\x1b" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "values",
    [
        {"weight": torch.ones(3, dtype=torch.int64)},
        {"weight": torch.ones(2, 2).to_sparse()},
        {"": torch.ones(1)},
        {5: torch.ones(1)},
        5,
    ],
)
def test_weights_of_another_form_end_the_run_with_a_line(interrupted_run, values):
    """In the file, and in what the user's hooks have put others in place of."""
    run = interrupted_run()
    if isinstance(values, dict):
        values = {f"line.{name}" if type(name) is str else name: values[name] for name in values}

    def change(content: dict) -> None:
        weights = content["state_dict"]
        content[checkpoint_file.BEFORE_HOOKS]["state_dict"] = (
            {**weights, **values} if isinstance(values, dict) else values
        )

    forge(run, change)
    with pytest.raises(UserError, match="(found (state_dict|entries)|the model has not got)"):
        Run(run).fit()


def test_a_tracker_has_no_more_steps_than_were_saved(interrupted_run, bounded):
    run = interrupted_run()

    def change(content: dict) -> None:
        tracked = state_of_rank(content)["metrics"]["tracked"]
        assert tracked
        tracked |= dict.fromkeys(tracked, 10**9)

    forge(run, change)
    again = Run(run)
    again.fit()
    assert len(again.model.tracker) < 10


def holding_itself() -> list:
    value: list = []
    value.append(value)
    return value


def doubled(times: int) -> list:
    value: list = [1]
    for _ in range(times):
        value = [value, value]
    return value


def of_one_text() -> list:
    return ["x" * 100_000] * 20_000


def of_one_tensor() -> list:
    values = torch.ones(100_000)
    return [values[index:] for index in range(1_000)]


def sparse() -> torch.Tensor:
    values = torch.ones(1).expand(10**9)
    return torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64).expand(1, 10**9), values, (2,)
    )


@pytest.mark.parametrize(
    "make",
    [
        holding_itself,
        lambda: doubled(50),
        of_one_text,
        of_one_tensor,
        expanded,
        sparse,
    ],
)
def test_what_a_checkpoint_holds_is_not_larger_than_its_file(interrupted_run, bounded, make):
    """It is skipped as a damaged one is; without another one, the run does not start over."""
    run = interrupted_run()
    path = forge(run, lambda content: state_of_rank(content).update(events=make()))
    with pytest.raises(
        UserError, match="found checkpoints, but none that every host has"
    ) as raised:
        Run(run).fit()
    assert f"{path} is forged: it is small, and what it holds is not" in str(raised.value)


def compressed(content: bytes) -> bytes:
    """Return a checkpoint's content with each part compressed: gigabytes of zeros are small."""
    output = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as parts, zipfile.ZipFile(output, "w") as smaller:
        for name in parts.namelist():
            smaller.writestr(name, parts.read(name), zipfile.ZIP_DEFLATED)
    return output.getvalue()


def encoded(content: bytes) -> bytes:
    """Return a checkpoint whose bytes are encoded again and again, each time to twice as many."""
    text = b"X\x04\0\0\0aaaaX\x06\0\0\0latin1\x86R"
    again = b"q\x01h\0h\x01X\x03\0\0\0hex\x86R"
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as parts:
        parts.writestr(
            "archive/data.pkl", b"\x80\x02c_codecs\nencode\nq\0" + text + again * 32 + b"."
        )
        parts.writestr("archive/version", "3\n")
    return output.getvalue()


def of_zeros(content: bytes) -> bytes:
    """Return a checkpoint that asks for a terabyte of zeros."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as parts:
        number = b"\x8a\x08" + (2**40).to_bytes(8, "little")
        pickled = b"\x80\x02cbuiltins\nbytearray\n" + number + b"\x85R."
        parts.writestr("archive/data.pkl", pickled)
        parts.writestr("archive/version", "3\n")
    return output.getvalue()


def deep(content: bytes) -> bytes:
    """Return a checkpoint that holds lists within lists."""
    lists = b"]" * 5_000 + b"a" * 4_999
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as parts:
        text = b"X\x13\0\0\0sagemaker_lightning"
        parts.writestr("archive/data.pkl", b"\x80\x02}" + text + b"}" + text + lists + b"ss.")
        parts.writestr("archive/version", "3\n")
    return output.getvalue()


def another_value(content: bytes) -> bytes:
    """Return the file of a list."""
    output = io.BytesIO()
    torch.save([1], output)
    return output.getvalue()


def no_zip(content: bytes) -> bytes:
    """Return a file of torch's old form, whose tensors may be larger than they are there."""
    output = io.BytesIO()
    torch.save({checkpoint_file.ENTRIES_KEY: {}}, output, _use_new_zipfile_serialization=False)
    return output.getvalue()


@pytest.mark.parametrize("change", [compressed, encoded, of_zeros, deep, another_value, no_zip])
def test_a_file_that_torch_would_unpack_to_more_is_not_read(interrupted_run, bounded, change):
    run = interrupted_run()
    path = forge(run, len)
    rewrite(path, change(path.read_bytes()[: -checkpoint_file.FOOTER.size]))
    with pytest.raises(
        UserError, match="found checkpoints, but none that every host has"
    ) as raised:
        Run(run).fit()
    assert len(str(raised.value)) < 700 and "\n" not in str(raised.value)


def test_text_of_a_checkpoint_is_printed_as_one_line(interrupted_run, capfd):
    """Its control sequences would move the cursor, or end the line."""
    run = interrupted_run()
    text = "\x1b[2J\nerror: all is lost" + "x" * 10_000

    def change(content: dict) -> None:
        entries = content[ENTRIES]
        entries["run"]["shapes"] = {text: [1]}
        entries["parts"]["loggers"] = [{"kind": "CSVLogger", "name": text, "version": text}]

    forge(run, change)
    with pytest.raises(UserError, match="of another run") as raised:
        Run(run).fit()
    message = str(raised.value)
    assert message.isprintable() and len(message) < 2_000


def test_a_log_continues_in_no_folder_with_a_name_that_moves_the_cursor(tmp_path):
    logger = CSVLogger(tmp_path, name="logs")
    prepare_files([logger], [{"kind": "CSVLogger", "name": "logs", "version": "a\x1b[2J"}])
    assert logger.version == 0


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("pytorch-lightning_version",), None),
        (("state_dict", "line.weight"), {"a": 5}),
        (("state_dict",), []),
        (("optimizer_states",), "text"),
        ((ENTRIES, "journal"), None),
        ((ENTRIES, "resumes"), "text"),
        ((ENTRIES, "run", "optimizers", "schedulers"), True),
    ],
)
def test_what_lightning_loads_is_refused_if_it_has_another_form(interrupted_run, keys, value):
    run = interrupted_run()

    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        assert keys[-1] in content
        content[keys[-1]] = value
        if value is None:
            del content[keys[-1]]

    forge(run, change)
    with pytest.raises(UserError, match="step-.*: found .*restore the checkpoint from a copy"):
        Run(run).fit()
