"""The parts of drill/command.py that need no run.

They are the list of interruptions, the working folder, and the comparison.
"""

import functools
import itertools
import json
import types
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import records
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.drill import command, comparison
from sagemaker_lightning.resume import checkpoint_file, drilled_run
from sagemaker_lightning.state import module_variables


def run_of(folder: Path, **changes) -> Path:
    """Write the files of a run, and return their folder.

    `changes` may change a step's loss, a weight, a metric, a curve's value or a row.
    """
    values = {
        "loss": 0.5,
        "weight": 1.0,
        "metric": 0.25,
        "curve": 2.0,
        "row": "3",
        "moment": 1,
        "steps": 2,
    } | changes
    model = folder / "ml/model"
    logs = folder / "ml/checkpoints/tensorboard"
    model.mkdir(parents=True)
    (folder / "work").mkdir()
    state = {"w": torch.tensor([0.0, values["weight"]])}
    own_state = {
        "number": values["moment"],
        "saved_at": values["moment"] / 2,
        "made": 0,
        "step": 2,
    }
    checkpoint = {
        "state_dict": state,
        "callbacks": {"Timer": {"time_elapsed": values["moment"]}},
        checkpoint_file.ENTRIES_KEY: own_state,
    }
    checkpoint_file.write(
        folder / "ml/checkpoints/step-000000002.ckpt", checkpoint, 2, values["moment"]
    )
    torch.save(state, model / "model.pt")
    (model / "model.json").write_text(json.dumps({"metrics": {"val_loss": values["metric"]}}))
    (folder / "work/rows.csv").write_text(f"step,value\n1,{values['row']}\n")
    with SummaryWriter(str(logs / "version_0")) as writer:
        writer.add_scalar("loss", values["curve"], 1)
    with SummaryWriter(str(logs / "version_0/system/localhost")) as writer:
        writer.add_scalar("system/cpu", values["moment"], 1)
    step = {"batch": "aa", "learning rate": [(0.1).hex()]}
    steps = [
        {"at": ["batch", 0, k], "step": k + 1, **step, "loss": (0.5).hex()}
        for k in range(values["steps"])
    ]
    steps[-1]["loss"] = values["loss"].hex()
    lines = [json.dumps(entry) for entry in ({"at": ["start", 0], "step": 0, "workers": 0}, *steps)]
    # The run was killed while it wrote.
    (folder / "steps-0.jsonl").write_text("\n".join(lines) + '\n{"at": ["bat')
    return folder


CHANGES = {
    "loss": (
        0.75,
        "loss",
        "the loss of step 2 (epoch 0, batch 1): 0.5 left alone, 0.75 interrupted",
    ),
    "steps": (3, "steps", "step 3 (epoch 0, batch 2) was not done by the run left alone"),
    "weight": (3.0, "state", "state_dict.w in the last checkpoint: 1 of 2 values"),
    "metric": (0.5, "metrics", "metrics.val_loss in model.json: 0.25 left alone, 0.5 interrupted"),
    "curve": (
        4.0,
        "curve",
        "ml/checkpoints/tensorboard/version_0: loss, row 1: (1, 2.0) left alone, "
        "(1, 4.0) interrupted",
    ),
    "row": ("4", "curve", "work/rows.csv, row 2: ['1', '3'] left alone, ['1', '4'] interrupted"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_each_difference_is_found_first(tmp_path: Path, changed: str):
    value, difference_kind, expected_words = CHANGES[changed]
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other", **{changed: value})
    assert comparison.differences(alone, other_run)[0] == comparison.Difference(
        difference_kind, expected_words
    )


def test_moments_and_the_machines_load_are_no_difference(tmp_path: Path):
    assert not comparison.differences(
        run_of(tmp_path / "alone"), run_of(tmp_path / "other", moment=2)
    )


def test_a_file_too_few_or_too_many_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other")
    (alone / "ml/model/first").write_text("1")
    (other_run / "ml/model/second").write_text("2")
    (alone / "ml/model/third").write_text("3")
    (other_run / "ml/model/third").write_text("4")
    differences_found = [
        difference.words for difference in comparison.differences(alone, other_run)
    ]
    assert differences_found == [
        "first in the model folder: the interrupted run has none",
        "second in the model folder: the run left alone has none",
        "third in the model folder: its bytes",
    ]


def run_positions(epochs: int, batches: int, validations: int, workers: int | None) -> list[dict]:
    """Return the lines that a run writes."""
    positions = [{"at": ["start", 0], "step": 0, "workers": workers}]
    for epoch in range(epochs):
        positions += [{"at": ["batch", epoch, batch]} for batch in range(batches)]
        positions += [{"at": ["validation", epoch, batches, batch]} for batch in range(validations)]
        positions += [{"at": ["epoch", epoch]}]
    return positions


def test_the_moments_lie_in_the_middle_of_the_run():
    interruptions, lacking = command.planned(run_positions(3, 4, 3, workers=0))
    assert {interruption.name: interruption.moment for interruption in interruptions} == {
        "kill-in-epoch": ("batch", 1, 2),
        "stop-in-epoch": ("batch", 1, 1),
        "kill-at-epoch-end": ("epoch", 0),
        "stop-at-epoch-end": ("epoch", 0),
        "kill-in-validation": ("validation", 1, 4, 1),
        "stop-in-validation": ("validation", 1, 4, 0),
        "workers": ("batch", 1, 1),
    }
    assert (
        not lacking
        and [interruption.name for interruption in interruptions] == command.INTERRUPTION_NAMES
    )
    assert [
        interruption.workers for interruption in interruptions if interruption.workers is not None
    ] == [2]


def test_what_a_run_has_no_moment_for_is_said():
    interruptions, lacking = command.planned(run_positions(1, 4, 0, workers=None))
    assert [interruption.name for interruption in interruptions] == [
        "kill-in-epoch",
        "stop-in-epoch",
    ] and len(lacking) == 3


def test_what_a_run_says_of_itself():
    output = (
        "resuming from step 4: x\nresumed at step 4: the next step is that of before\nerror: no\n"
        "error: a [host b]\n"
    )
    result = command.RunResult(1, True, f"{output}last\n")
    assert (
        result.verdict == "resumed at step 4: the next step is that of before"
        and result.error == "error: a [host b]"
    )
    result = command.RunResult(
        1,
        True,
        f"warning: {output[24:]}Traceback (most recent call last):\n  File x\nKeyError: 'x'\n",
    )
    assert result.verdict.startswith("warning: resumed at step 4: the next")
    assert (
        command.RunResult(
            1, True, "Traceback (most recent call last):\n  File x\nKeyError: 'x'\n"
        ).error
        == "KeyError: 'x'"
    )
    assert command.RunResult(0, True, "").verdict == ""


def test_the_working_folder_is_mirrored_and_not_written_to(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command, "MAX_COPIED_BYTES", (10, 12))
    monkeypatch.setattr(command, "MAX_ENTRIES", 12)
    home, data, large_folder, drill_folder = (
        tmp_path / "home" / name for name in ("", "data", "many", "drill-1")
    )
    for folder in (data, large_folder, drill_folder, home / ".git"):
        folder.mkdir(parents=True)
    (data / "small").write_text("small")
    (data / "large").write_text("larger than ten bytes")
    (data / "tenth").write_text("10 letters")
    (home / "data/link").symlink_to("small")
    for number in range(12):
        (large_folder / str(number)).touch()
    command.mirror(home, tmp_path / "copy", drill_folder)
    copy = tmp_path / "copy"
    assert (copy / "data/small").read_text() == "small" and not (copy / "data/small").is_symlink()
    assert (copy / "data/large").is_symlink() and (
        copy / "data/large"
    ).read_text() == "larger than ten bytes"
    assert (copy / "data/tenth").is_symlink(), "all of them together are too large"
    assert (copy / "data/link").read_text() == "small"
    assert (
        (copy / "many").is_symlink()
        and (copy / ".git").is_symlink()
        and not (copy / "drill-1").exists()
    )
    (copy / "data/small").write_text("other")
    (copy / "data/new").touch()
    assert (data / "small").read_text() == "small" and not (data / "new").exists()


SEEN = 0


def counted(samples):
    """Count in a variable of the module."""
    global SEEN
    SEEN += len(samples)
    return samples


def made_of(iterator):
    """Return a function that counts by an iterator."""
    return lambda: next(iterator)


def test_variables_that_change_are_named():
    objects = {
        "collate_fn": counted,
        "count": made_of(itertools.count()),
        "still": made_of(iter([1, 2])),
    }
    objects |= {"endless": made_of(item for item in [1, 2]), "long": made_of(iter(range(10**9)))}
    digests_before = module_variables.variable_digests(objects, objects)
    counted([1, 2])
    for name in ("count", "endless", "long"):
        objects[name]()
    named = [
        "test_drill_comparison.SEEN",
        "test_drill_comparison.made_of.<locals>.<lambda>.iterator",
    ]
    assert (
        module_variables.changed_variables(
            digests_before, module_variables.variable_digests(objects, objects)
        )
        == named
    )


class Meter:
    """A sum of losses, as in PyTorch's ImageNet example; other such sums follow."""

    instances = []

    def __init__(self) -> None:
        self.sum = 0.0
        self.instances.append(self)


METER = Meter()
BANK = torch.zeros(100_000, 2)
SCORES = [0] * 100_000
FRIEND = torch.nn.BatchNorm1d(2)
MODEL = Meter()
MODELS = [MODEL]


@functools.lru_cache
def projection(size):
    return torch.randn(size)


@functools.lru_cache
def squares(size):
    return torch.arange(size) ** 2


def remembers(number):
    """Change all of these."""
    remembers.calls += 1
    METER.sum += number
    BANK[:] = number
    SCORES[0] = number
    FRIEND(torch.ones(2, 2) * number)
    records.limit = number
    MODELS[0].sum += number
    projection(number), squares(number)


remembers.calls = 0


def test_objects_in_variables_that_change_are_named(monkeypatch):
    """What a checkpoint has is not named, nor a cache of what is computed again."""
    monkeypatch.setattr(records, "limit", 0, raising=False)
    digests = lambda: module_variables.variable_digests(  # noqa: E731
        {"collate_fn": remembers, "model": MODEL}, {"model": MODEL}
    )
    before = digests()
    assert digests() == before
    assert not [name for name in before if name.startswith("torch.") or name.endswith("__")]
    remembers(3)
    changed = module_variables.changed_variables(before, digests())
    assert [name for name in changed if "FRIEND.running" not in name] == [
        "records.limit",
        "test_drill_comparison.BANK",
        "test_drill_comparison.FRIEND.num_batches_tracked",
        "test_drill_comparison.METER.sum",
        "test_drill_comparison.SCORES",
        "test_drill_comparison.projection",
        "test_drill_comparison.remembers.calls",
    ]
    Meter()
    assert "test_drill_comparison.Meter.instances" in module_variables.changed_variables(
        before, digests()
    )


def test_what_a_function_has_closed_over_is_named_where_no_checkpoint_has_it():
    total = 0

    def add():
        nonlocal total
        total += 1

    digests_before = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    add()
    digests_after = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    assert module_variables.changed_variables(digests_before[0], digests_after[0]) == [
        f"test_drill_comparison.{add.__qualname__}.total"
    ]
    assert module_variables.changed_variables(digests_before[1], digests_after[1]) == []


class Holder:
    """Has containers, modules and metrics, which a checkpoint does not have."""

    def __init__(self) -> None:
        self.objects = [object()]
        self.waiting = deque([object()])
        self.by_name = {"a": object()}
        self.mean = torchmetrics.MeanMetric()
        self.layer = torch.nn.Linear(1, 1)
        self.large = torch.nn.Embedding(70_000, 1)
        self.lazy = torch.nn.LazyLinear(1)
        self.numbers = np.zeros(70_000)
        self.rows = torch.zeros(5_000, 20)
        self.sparse = torch.zeros(300, 300).to_sparse()
        self.text = {str(key): key for key in range(70_000)}
        self.position = itertools.count()
        self.limit = 3

    def change(self) -> None:
        self.objects.append(object())
        self.waiting.append(object())
        self.by_name["b"] = object()
        self.mean.update(1.0)
        with torch.no_grad():
            for tensor in (self.layer.bias, self.large.weight, self.rows):
                tensor += 1
        self.numbers[0] = 1
        self.text["a"] = 1
        next(self.position)


HOLDER = Holder()


def holds(samples):
    return HOLDER, samples


def test_what_the_objects_in_variables_hold_is_compared():
    """Of a large module, its weights are not: the model's are in the checkpoint."""
    digests = functools.partial(module_variables.variable_digests, {"collate_fn": holds}, {})
    before = digests()
    assert digests() == before
    HOLDER.change()
    name = "test_drill_comparison.HOLDER"
    assert {
        changed.removeprefix(f"{name}.")
        for changed in module_variables.changed_variables(before, digests())
        if changed.startswith(name)
    } == {
        "objects",
        "waiting",
        "by_name",
        "mean",
        "layer.bias",
        "numbers",
        "rows",
        "text",
        "position",
    }
    saved = module_variables.variable_digests({"collate_fn": holds}, {"holder": HOLDER})
    assert not any(key.startswith(f"{name}.") and "position" not in key for key in saved)


def test_the_position_of_an_iterator_with_up_to_ten_thousand_elements_is_known():
    owner = Meter()
    owner.short, owner.long = iter(range(10_000)), iter(range(10_001))
    owner.functions = iter([lambda: 0])
    digests = module_variables.variable_digests({"data": owner}, {"data": owner})
    assert {name for name in digests if name.startswith("data.")} == {"data.short"}
    next(owner.short)
    digests_after = module_variables.variable_digests({"data": owner}, {"data": owner})
    assert module_variables.changed_variables(digests, digests_after) == ["data.short"]


HELPERS = types.ModuleType("a_users_helpers")
exec("CALLS = [0]\ndef count():\n    CALLS[0] += 1\n", vars(HELPERS))


def calls_a_helper(samples):
    HELPERS.count()
    return samples


def test_variables_of_other_modules_whose_functions_are_called_are_compared():
    roots = {"collate_fn": calls_a_helper}
    before = module_variables.variable_digests(roots, {})
    calls_a_helper([])
    after = module_variables.variable_digests(roots, {})
    assert module_variables.changed_variables(before, after) == ["a_users_helpers.CALLS"]


def test_code_of_the_users_own_is_told_from_a_librarys():
    assert module_variables.is_own(counted) and module_variables.is_own(Meter)
    assert module_variables.is_own(functools.partial(functools.partial(counted, 1), 2))
    assert not module_variables.is_own(functools.partial(torch.relu, 1))
    assert not module_variables.is_own(torch.nn.Linear)


@pytest.mark.parametrize(("workers_before", "workers_after"), [(0, 2), (2, 0), (1, 2)])
def test_a_loader_gets_another_number_of_workers(workers_before, workers_after):
    settings = (
        {"persistent_workers": True, "timeout": 5, "prefetch_factor": 3} if workers_before else {}
    )
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=workers_before, **settings)
    drilled_run._set_workers(loader, workers_after)
    fresh = DataLoader(
        TensorDataset(torch.arange(8)),
        2,
        num_workers=workers_after,
        **(settings if workers_after and workers_before else {}),
    )
    names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
    assert [getattr(loader, name) for name in names] == [getattr(fresh, name) for name in names]
    assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(8))
