"""Which of a user's objects a line names, because it cannot be saved."""

import cProfile
import csv
import functools
import hashlib
import io
import itertools
import logging
import multiprocessing
import operator
import os
import queue
import random
import re
import subprocess
import sys
import threading
import weakref
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import scipy.spatial
import scipy.stats
import torch
import tqdm
from pytorch_lightning import LightningDataModule, LightningModule
from sklearn.isotonic import IsotonicRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn
from torch.distributed import HashStore
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import MeanMetric, MetricTracker
from untrained import resumed
from user_state import (
    UNSAVED,
    Holding,
    Model,
    Points,
    Row,
    Sharing,
    in_training,
    own_hook,
    state_of,
    told,
)

from sagemaker_lightning.resume.parts.given_parts import HINT
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph

# What is said -------------------------------------------------------------------------------------


COUNT = 0
SIGNS = itertools.repeat(1, 99)


class Counts(LightningModule):
    def training_step(self, batch, batch_idx):
        return COUNT * next(SIGNS)


def test_a_variable_that_no_checkpoint_can_hold_is_reported_once_it_changes(monkeypatch, capsys):
    says = (
        f"warning: {__name__}.SIGNS changes while training, and no checkpoint has it: a resumed "
        "run starts "
        "with its first value; keep it in an attribute of the model, or give it as a part: "
        "ExactResume(parts={...})\n"
    )
    for rank, expected in ((0, says), (1, "")):
        state = state_of(Counts())
        in_training(state)
        if rank:
            monkeypatch.setattr(type(state.trainer), "is_global_zero", False)
        state.encode_changes(ResumePoint.BATCH)
        next(SIGNS)
        state.encode_changes()
        assert capsys.readouterr().out == ""
        state.encode_changes(ResumePoint.BATCH)
        assert capsys.readouterr().out == expected
        state.encode_changes(ResumePoint.BATCH)
        assert capsys.readouterr().out == ""


class Registry:
    """Has one object, which is made when it is needed."""

    only = None

    @classmethod
    def count(cls) -> int:
        cls.only = cls.only or Registry()
        vars(cls.only)["steps"] = vars(cls.only).get("steps", 0) + 1
        return cls.only.steps


class Registered(LightningModule):
    def training_step(self, batch, batch_idx):
        return Registry.count() + COUNT


def test_variables_of_modules_and_classes_come_back(monkeypatch, capsys):
    state = state_of(Registered())
    in_training(state)
    monkeypatch.setitem(globals(), "COUNT", 5)
    Registry.count()
    saved = state.encode_changes(ResumePoint.BATCH)
    only = Registry.only
    monkeypatch.setitem(globals(), "COUNT", 0)
    Registry.only = None
    again = state_of(Registered())
    in_training(again)
    again.restore(saved)
    assert COUNT == 5 and type(Registry.only) is Registry and Registry.only is not only
    assert Registry.only.steps == 1
    Registry.only = None
    assert "no checkpoint has it" not in capsys.readouterr().out


def test_what_a_function_keeps_and_no_checkpoint_can_hold_is_reported(capsys):
    row = None

    def fill():
        nonlocal row
        row = Row()

    class Filling(Model):
        def training_step(self, batch, batch_idx):
            fill()
            return row

    state = state_of(model := Filling())
    assert told(capsys, state) == []
    model.training_step(None, 0)
    (line,) = told(capsys, state)
    name = f"{__name__}.test_what_a_function_keeps_and_no_checkpoint_can_hold_is_reported.<locals>"
    assert line.startswith(f"{name}.Filling.training_step.row holds a user_state.Row{UNSAVED}")


def test_what_is_in_a_file_starts_with_what_the_file_has(tmp_path, capsys):
    np.zeros(4).tofile(tmp_path / "map")
    model = Model(scores=np.memmap(tmp_path / "map", np.float64, "r+"))
    state = state_of(model)
    assert told(capsys, state) == []
    model.scores[0] = 1
    (line,) = told(capsys, state)
    says = "which cannot be saved: a resumed run starts with what is in its file then; keep "
    assert line.startswith(f"user_state.Model.scores is a numpy.memmap, {says}")


class Hooked(Model):
    """Keeps, in a hook, what cannot be saved."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
        counts = queue.Queue()

        def count(module, *_):
            counts.put(module)

        self.line.register_forward_hook(count)


def test_what_a_hook_has_closed_over_and_no_checkpoint_can_hold_is_reported(capsys):
    state = state_of(model := Hooked())
    assert told(capsys, state) == []
    model.line(torch.ones(1))
    (line,) = told(capsys, state)
    name = f"{__name__}.Hooked.__init__.<locals>.count"
    assert line.startswith(f"{name} holds a queue.Queue, which cannot be")


INNER = None


class Adapts(Model):
    def training_step(self, batch, batch_idx):
        return INNER.step()


@pytest.mark.parametrize("at_start", [True, False])
def test_an_optimizer_in_a_variable_comes_back(monkeypatch, capsys, at_start):
    def make(model):
        return SGD(model.body.parameters(), 0.5, momentum=0.5)

    def begun():
        model = Adapts()
        monkeypatch.setitem(globals(), "INNER", make(model) if at_start else None)
        return state_of(model), model

    state, model = begun()
    monkeypatch.setitem(globals(), "INNER", INNER or make(model))
    model.body[0](torch.ones(1)).sum().backward()
    model.training_step(None, 0)
    saved = state.encode_changes(None)
    other, restored = begun()
    other.restore(saved)
    state_of_weight = INNER.state[restored.body[0].weight]
    assert torch.equal(state_of_weight["momentum_buffer"], torch.ones(1, 1))
    assert capsys.readouterr().out == ""


def test_a_metric_that_only_a_function_has_comes_back():
    def make():
        mean = MeanMetric()

        class Measuring(Model):
            def training_step(self, batch, batch_idx):
                mean.update(batch)
                return mean.compute().item()

        return Measuring()

    state = state_of(model := make())
    metrics = state.run.part(Metrics)
    model.training_step(1.0, 0), model.training_step(2.0, 1)
    saved = metrics.save(None, None)
    other = state_of(resumed_model := make())
    resumed(other.run, metrics=saved)
    other.run.part(Metrics).restore(saved, Moment.TRAINING)
    assert resumed_model.training_step(6.0, 2) == 3


def hooked() -> SGD:
    """Return an optimizer with a function that no checkpoint can name."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        lambda: {1: hooked()},
        lambda: {1: ParametrizationList([nn.Tanh()], nn.Parameter(torch.ones(1)))},
    ],
)
def test_what_has_state_and_is_made_while_training_is_reported_before_an_interruption(capsys, make):
    model = Model(own=None)
    state = state_of(model)
    assert told(capsys, state) == []
    model.own = make()
    (line,) = told(capsys, state)
    assert line.startswith("user_state.Model.own ") and "which cannot be saved" in line
    assert told(capsys, state) == []


@pytest.mark.parametrize(
    ("make", "first", "other"),
    [
        (operator.itemgetter, 0, 1),
        (scipy.stats.norm, 0.0, 1.0),
    ],
)
def test_a_librarys_object_in_the_place_of_another_is_reported_if_it_holds_something_else(
    capsys, make, first, other
):
    model = Model(own=make(first))
    state = state_of(model)
    model.own = make(first)
    assert told(capsys, state) == []
    model.own = make(other)
    (line,) = told(capsys, state)
    assert line.startswith("user_state.Model.own is a") and "cannot be saved" in line


def test_a_librarys_values_are_reported_if_the_code_has_no_name_for_their_class(capsys):
    """A writer, such as of a table, is made again by the code that made it."""
    model = Model(later=None, curve=None, writer=None)
    state = state_of(model)
    model.later, model.writer = scipy.stats.norm(1.0), csv.writer(io.TextIOWrapper(io.BytesIO()))
    # It leaves a function out of its copies.
    model.curve = IsotonicRegression().fit(np.arange(3.0), np.arange(3.0))
    curve, later = sorted(told(capsys, state))
    assert later.startswith("user_state.Model.later is a scipy.stats")
    assert curve.startswith("user_state.Model.curve is a sklearn.isotonic")


def test_what_c_code_makes_of_arrays_is_reported_and_compared(capsys):
    """A hook that is called again may make it of another state."""
    model = Model(tree=None)
    state = state_of(model)

    def unsaved(rows):
        model.tree = scipy.spatial.cKDTree(np.arange(2.0 * rows).reshape(rows, 2))
        return state.encode_changes()[UserObjects.key]["unsaved"]

    first = unsaved(3)
    (line,) = capsys.readouterr().out.splitlines()
    name = "user_state.Model.tree is a scipy.spatial._ckdtree.cKDTree"
    assert line.startswith(f"warning: {name}, which cannot be saved")
    assert first == unsaved(3) != unsaved(4)


def test_what_a_librarys_object_has_got_and_cannot_be_saved_is_reported(capsys):
    model = Model(own=DecisionTreeClassifier())
    state = state_of(model)
    assert told(capsys, state) == []
    model.own.fit(np.eye(2), [0, 1])
    (line,) = told(capsys, state)
    assert "Model.own holds a sklearn.tree._tree.Tree, which cannot" in line


def test_what_is_changed_in_a_memory_is_reported(capsys):
    model = Model(own=memoryview(bytearray(2)))
    state = state_of(model)
    assert told(capsys, state) == []
    model.own[0] = 3
    (line,) = told(capsys, state)
    assert line.startswith("user_state.Model.own is a ") and "cannot be saved" in line


class Measuring(Model):
    """Gets metrics in hooks and on first use."""

    def on_train_epoch_start(self):
        self.mean = MeanMetric()

    def on_validation_epoch_start(self):
        self.error = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.loss = MeanMetric()


def test_a_metric_that_a_hook_makes_is_not_reported_and_one_that_a_step_makes_is(capsys):
    state = state_of(model := Measuring())
    model.on_train_epoch_start()
    model.on_validation_epoch_start()
    assert told(capsys, state) == []
    model.training_step(None, 0)
    (line,) = told(capsys, state)
    name = "torchmetrics.aggregation.MeanMetric"
    assert line.startswith(f"{__name__}.Measuring.loss is a {name}{UNSAVED}")


def test_a_function_that_a_module_gets_in_place_of_another_is_reported(monkeypatch, capsys):
    state = state_of(Chooses())
    in_training(state)
    monkeypatch.setitem(globals(), "criterion", lambda: 2)
    state.encode_changes(ResumePoint.BATCH)
    says = f"warning: {__name__}.criterion changes while training, and no checkpoint has it"
    assert capsys.readouterr().out.startswith(says)


def criterion():
    return 1


class Chooses(LightningModule):
    def training_step(self, batch, batch_idx):
        return criterion()


def test_modules_beside_the_model_have_their_modes_again():
    def made():
        return Holding(teacher=nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))

    trained, resumed_one = made(), made()
    state = state_of(None, trained)
    trained.teacher[1].eval()
    trained.teacher[0].bias.requires_grad_(False)
    saved = state.encode_changes()
    state_of(None, resumed_one).restore(saved)
    modes = [module.training for module in resumed_one.teacher]
    assert modes == [True, False] and not resumed_one.teacher[0].bias.requires_grad
    assert resumed_one.teacher[0].weight.requires_grad


def test_a_container_of_what_cannot_be_saved_is_reported_once(capsys):
    """If it has changed; what a library has put there is the library's."""
    model = Model(rows=[Row()], kept=[Row()], libraries=[random.Random(1)])
    callback = Holding(rows={})
    state = state_of(model, callback)
    assert told(capsys, state) == []
    model.rows.append(Row())
    model.libraries.append(SimpleNamespace())
    callback.rows["a"] = Row()
    lines = told(capsys, state)
    begins = [
        f"user_state.{name} holds a user_state.Row{UNSAVED}"
        for name in ("Model.rows", "Holding.rows")
    ]
    assert len(lines) == 2 and all(map(str.startswith, sorted(lines, reverse=True), begins))
    model.rows.append(Row())
    assert told(capsys, state) == []


def test_the_steps_of_a_metric_tracker_are_not_reported(capsys):
    state = state_of(model := Model(tracker=MetricTracker(MeanMetric(), maximize=True)))
    for value in (1.0, 2.0):
        model.tracker.increment()
        model.tracker.update(value)
    assert told(capsys, state) == []


class Tracker:
    """Counts beside what cannot be saved."""

    def __init__(self) -> None:
        self.file = io.TextIOWrapper(io.BytesIO())
        self.count = 0


class Tracking(Model):
    """Makes trackers on first use, and another one for each epoch."""

    tracker = None

    def on_train_epoch_start(self):
        self.of_epoch = Tracker()

    def training_step(self, batch, batch_idx):
        self.tracker = self.tracker or Tracker()
        self.writers = {"file": io.TextIOWrapper(io.BytesIO()), "folder": "x"}
        self.state = {"file": io.TextIOWrapper(io.BytesIO()), "steps": 1}
        self.rules["name"] = operator.itemgetter("b")
        self.rules["steps"] = 2


def test_what_is_lost_with_what_cannot_be_saved_is_reported_ahead(capsys):
    state = state_of(model := Tracking(rules={"name": operator.itemgetter("a")}))
    model.on_train_epoch_start()
    model.training_step(None, 0)
    lines = sorted(told(capsys, state))
    begins = [
        f"{__name__}.Tracking.rules holds an operator.itemgetter{UNSAVED}",
        f"{__name__}.Tracking.state holds a _io.TextIOWrapper{UNSAVED}",
        f"{__name__}.Tracking.tracker holds a {__name__}.Tracker{UNSAVED}",
    ]
    assert len(lines) == 3 and all(map(str.startswith, lines, begins))


def test_what_another_package_cannot_save_is_reported_by_the_users_name(capsys):
    """Once for each attribute of the user's, and not by what the package calls its own."""
    package = {"__module__": "yaml"}  # any that is installed
    study = type("Study", (), package)()
    study.storage = type("Storage", (), package)()
    study.storage.trials = []
    study.trials = []
    state = state_of(None, Holding(study=study))
    study.storage.trials.append(Row())
    study.trials.append(Row())
    (line,) = told(capsys, state)
    assert line.startswith(f"user_state.Holding.study holds a user_state.Row{UNSAVED}")
    assert told(capsys, state) == []


def test_a_function_that_the_program_has_nowhere_at_its_start_is_reported_once(capsys):
    model = Model(rules=[abs, own_hook], rule=abs)
    state = state_of(model)
    model.rule = own_hook
    assert told(capsys, state) == []
    model.rule = lambda value: value
    (line,) = told(capsys, state)
    assert line.startswith(
        "user_state.Model.rule was set to a function or a class that the model did"
    )
    assert told(capsys, state) == []


def test_a_table_that_changes_is_reported_unless_it_is_data_that_are_read(capsys):
    def table():
        return pyarrow.table({"x": [1.0]})

    class Data(LightningDataModule):
        rows = None

    model, points, data = Model(rows=table()), Points(rows=table()), Data()
    state = state_of(model, train=[DataLoader(points)], val=[DataLoader(other := Points())])
    state.trainer.datamodule = data
    state.run.mark_start()
    assert told(capsys, state) == []
    model.rows, points.rows, other.rows, data.rows = (table() for _ in range(4))
    lines = sorted(told(capsys, state))
    begins = [
        f"user_state.{name}.rows is a pyarrow.lib.Table{UNSAVED}" for name in ("Model", "Points")
    ]
    assert len(lines) == 2 and all(map(str.startswith, lines, begins))


def test_what_data_open_to_read_is_no_loss_where_there_was_nothing(tmp_path, capsys):
    """They open it again; what the model has opened is lost."""
    np.arange(4.0).tofile(path := tmp_path / "x.bin")
    with zipfile.ZipFile(archive := tmp_path / "x.zip", "w"):
        pass

    def opened():
        return np.memmap(path, mode="r")

    data = Points(array=None, file=None, files={})
    checked = Points(array=opened())  # the check before training has drawn from it
    model = Model(file=None)
    state = state_of(model, train=[DataLoader(data)], val=[DataLoader(checked)])
    data.array, checked.array = opened(), opened()
    data.file, model.file = zipfile.ZipFile(archive), zipfile.ZipFile(archive)
    data.files["x"] = zipfile.ZipFile(archive)
    saved = state.run.part(UserObjects).save(ResumePoint.BATCH, None)
    assert sorted(saved["unsaved"]) == ["model.file"]
    assert capsys.readouterr().out == ""


def test_other_ranks_tell_nothing(monkeypatch, capsys):
    model = Model(rows=[Row()], batches=iter([1]))
    state = state_of(model)
    monkeypatch.setattr(type(state.trainer), "is_global_zero", False)
    model.rows.append(Row())
    state.state.reordered.add("model.names")
    state.restore(state.encode_changes())
    assert capsys.readouterr().out == ""


def test_an_iterator_is_reported_once(capsys):
    class Saves:
        def __iter__(self):
            return self

        def __next__(self):
            return 1

    batches = iter(DataLoader(range(4)))
    next(batches)  # before the training: how it began is not known
    own = Saves()
    state = state_of(
        Sharing(
            batches=batches,
            signs=itertools.cycle({1}),
            file=io.TextIOWrapper(io.BytesIO()),
            own=own,
            proxy=weakref.proxy(own),
            calls=iter(lambda: 1, 2),
        )
    )
    lines = told(capsys, state)
    assert lines[0] == (
        "model.batches is a torch.utils.data.dataloader._SingleProcessDataLoaderIter, and its "
        "position cannot be saved: after an interruption this run is not exact; keep an "
        "index, or a loader with state_dict()"
    )
    assert [line.split()[0] for line in lines] == ["model.batches", "model.signs"]
    assert told(capsys, state) == []


BATCHES = iter(DataLoader(range(4)))
next(BATCHES)


def test_a_loaders_dataset_that_is_an_iterator_begins_again_with_each_epoch(monkeypatch, capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

    is_one = object_graph.is_library_iterator  # as litdata's StreamingDataset is one
    monkeypatch.setattr(
        object_graph, "is_library_iterator", lambda value: is_one(value) or type(value) is Stream
    )
    assert told(capsys, state_of(train=DataLoader(Stream()))) == []
    (line,) = told(capsys, state_of(Model(stream=Stream()), train=DataLoader(Stream())))
    assert line.startswith("model.stream is a ")


class Draws(LightningModule):
    def training_step(self, batch, batch_idx):
        return next(BATCHES)


PACE = (rate for rate in (0.1, 0.2, 0.3))


class Paced(LightningModule):
    def on_train_epoch_end(self):
        return next(PACE)


def test_an_iterator_in_a_variable_is_reported(capsys):
    (line,) = told(capsys, state_of(Draws()))
    assert line.startswith(
        f"variables.{__name__}.BATCHES is a torch.utils.data.dataloader._SingleProcessDataLoader"
    )
    (line,) = told(capsys, state_of(Paced()))
    assert line.startswith(f"variables.{__name__}.PACE is a generator, and its position cannot be")


def test_what_nobody_can_read_is_reported_once_at_the_first_checkpoint(capsys):
    here, there = multiprocessing.Pipe()
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    model = Model(hash=hashlib.sha256(), packs=[zlib.compressobj()], child=here, program=program)
    in_training(state := state_of(model))
    lines = []
    for _ in range(2):
        state.encode_changes(ResumePoint.BATCH)
        lines.append(capsys.readouterr().out.splitlines())
    program.communicate()
    assert lines[0][0] == (
        "warning: user_state.Model.hash is a _hashlib.HASH, which has hidden state that cannot be "
        "saved: a resumed run has the one that the program makes at its start; if training depends "
        "on it, give it as a part: ExactResume(parts={...})"
    )
    names = [line.split()[1].removeprefix("user_state.Model.") for line in lines[0]]
    assert names == ["hash", "child", "program", "packs"]
    assert "reads from another process" in lines[0][1] and lines[1:] == [[]]
    there.close()


def test_what_a_managers_process_has_is_reported_at_the_first_checkpoint(capsys):
    with multiprocessing.Manager() as manager:
        in_training(state := state_of(Model(seen=manager.dict(), store=HashStore())))
        state.encode_changes(ResumePoint.BATCH)
        lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines, ("multiprocessing.managers.DictProxy", "HashStore"), strict=True):
        assert f"{name}, which reads from another process" in line


def test_a_hash_that_is_made_while_training_is_reported(capsys):
    state = state_of(model := Model(hash=None))
    model.hash = hashlib.sha256()
    assert [line.split()[0] for line in told(capsys, state)] == ["user_state.Model.hash"]


def test_results_that_are_kept_are_reported_and_make_no_resume_differ(capsys):
    state = state_of(model := Model(look=functools.lru_cache(lambda number: number)))
    model.look(1)
    (line,) = told(capsys, state)
    assert line.startswith("user_state.Model.look keeps results, and no checkpoint has them")
    assert state.encode_changes()[UserObjects.key]["unsaved"] == {}


def test_what_holds_no_values_is_not_reported(capsys, tmp_path):
    out = (tmp_path / "text").open("a")
    handler = logging.StreamHandler(out)
    writer = SummaryWriter(tmp_path)
    bar = tqdm.tqdm(total=2, file=out)
    pool = ThreadPoolExecutor(1)
    values = {
        "lock": threading.RLock(), "log": logging.getLogger("own"), "handler": handler,
        "out": out, "std": sys.stdout, "bar": bar, "pattern": re.compile("a"),
        "kind": np.dtype("f4"), "add": np.add, "place": torch.device("cpu"),
        "rows": csv.writer(out),
        "event": torch.Event(), "writer": writer, "watch": torch.profiler.profile(), "pool": pool,
        "hook": nn.Linear(1, 1).register_forward_hook(print), "time": cProfile.Profile(),
        "environment": os.environ, "module": np, "function": print,
    }  # fmt: skip
    in_training(state := state_of(Model(held=None, **values)))
    bar.update()
    out.write("text")
    values["rows"].writerow(["text"])
    writer.add_scalar("loss", 1)
    pool.submit(str).result()
    values["log"].warning("text")
    state.encode_changes(ResumePoint.BATCH)
    writer.close()
    pool.shutdown()
    assert "Model." not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("paths", "which"),
    [({"model.names"}, "this set"), ({"model.names[1]", "model.names[3].a"}, "a set in it")],
)
def test_sets_in_another_order_are_reported_once_by_their_attribute(capsys, paths, which):
    state = state_of()
    saved = state.encode_changes()
    state.state.reordered |= paths
    state.restore(saved)
    assert capsys.readouterr().out == (
        f"warning: model.names: after an interruption the elements of {which} may come in "
        "another order: if training depends on it, sort them first, or keep a list or a dict\n"
    )
    state.restore(saved)
    assert capsys.readouterr().out == ""


def test_a_file_that_its_opening_empties_is_reported_once_it_is_written(capsys, tmp_path):
    """One that is appended to, or written by nobody, is not; one that is read in a loop, is."""
    (tmp_path / "read").write_text("1\n2\n")
    with ExitStack() as files:
        opened = {
            mode: files.enter_context((tmp_path / name).open(mode))
            for mode, name in (("w", "rows"), ("a", "log"), ("r", "read"), ("wb", "still"))
        }
        model = Model(rows=opened["w"], log=opened["a"], read=opened["r"], still=opened["wb"])
        model.shown = sys.stdout
        state = state_of(model)
        assert told(capsys, state) == []
        opened["w"].write("3\n")
        opened["a"].write("3\n")
        opened["r"].readline()
        assert told(capsys, state) == [
            'user_state.Model.rows is a file that opening empties (mode "w"), and training writes '
            'to it: a resumed run starts with an empty one; open it with "a", or keep what it '
            "holds in an "
            f"attribute, or {HINT}"
        ]
        opened["w"].write("4\n")
        assert told(capsys, state) == []
        next(opened["r"])
        assert told(capsys, state) == [
            "user_state.Model.read is a file that training reads, and no checkpoint has the place: "
            "a resumed run reads it from the place at its start; open it at the start, call "
            "readline() in place of taking lines in a loop, or keep what it holds in an attribute, "
            f"or {HINT}"
        ]
