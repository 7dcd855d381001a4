"""The parts of drill/command.py that need no run.

They are the list of interruptions, the working folder, and the comparison.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.drill import command, comparison, drilled_run
from sagemaker_lightning.resume import checkpoint_file
from sagemaker_lightning.state import module_variables


def run_of(folder: Path, **changes) -> Path:
    """Write the files of a run, and return their folder.

    `changes` may change a step's loss, a weight, a metric, a curve's value or a row.
    """
    given = {
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
    state = {"w": torch.tensor([0.0, given["weight"]])}
    ours = {"number": given["moment"], "saved_at": given["moment"] / 2, "made": 0, "step": 2}
    checkpoint = {
        "state_dict": state,
        "callbacks": {"Timer": {"time_elapsed": given["moment"]}},
        checkpoint_file.KEY: ours,
    }
    checkpoint_file.write(
        folder / "ml/checkpoints/step-000000002.ckpt", checkpoint, 2, given["moment"]
    )
    torch.save(state, model / "model.pt")
    (model / "model.json").write_text(json.dumps({"metrics": {"val_loss": given["metric"]}}))
    (folder / "work/rows.csv").write_text(f"step,value\n1,{given['row']}\n")
    with SummaryWriter(str(logs / "version_0")) as writer:
        writer.add_scalar("loss", given["curve"], 1)
    with SummaryWriter(str(logs / "version_0/system/localhost")) as writer:
        writer.add_scalar("system/cpu", given["moment"], 1)
    step = {"batch": "aa", "learning rate": [(0.1).hex()]}
    steps = [
        {"at": ["batch", 0, k], "step": k + 1, **step, "loss": (0.5).hex()}
        for k in range(given["steps"])
    ]
    steps[-1]["loss"] = given["loss"].hex()
    lines = [json.dumps(one) for one in ({"at": ["start", 0], "step": 0, "workers": 0}, *steps)]
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
    value, kind, words = CHANGES[changed]
    alone = run_of(tmp_path / "alone")
    other = run_of(tmp_path / "other", **{changed: value})
    assert comparison.differences(alone, other)[0] == comparison.Difference(kind, words)


def test_moments_and_the_machines_load_are_no_difference(tmp_path: Path):
    assert not comparison.differences(
        run_of(tmp_path / "alone"), run_of(tmp_path / "other", moment=2)
    )


def test_a_file_too_few_or_too_many_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other = run_of(tmp_path / "other")
    (alone / "ml/model/first").write_text("1")
    (other / "ml/model/second").write_text("2")
    (alone / "ml/model/third").write_text("3")
    (other / "ml/model/third").write_text("4")
    found = [difference.words for difference in comparison.differences(alone, other)]
    assert found == [
        "first in the model folder: the interrupted run has none",
        "second in the model folder: the run left alone has none",
        "third in the model folder: its bytes",
    ]


def done(epochs: int, batches: int, validations: int, workers: int | None) -> list[dict]:
    """Return the lines that a run writes."""
    found = [{"at": ["start", 0], "step": 0, "workers": workers}]
    for epoch in range(epochs):
        found += [{"at": ["batch", epoch, batch]} for batch in range(batches)]
        found += [{"at": ["validation", epoch, batches, batch]} for batch in range(validations)]
        found += [{"at": ["epoch", epoch]}]
    return found


def test_the_moments_lie_in_the_middle_of_the_run():
    found, lacking = command.planned(done(3, 4, 3, workers=0))
    assert {one.name: one.moment for one in found} == {
        "kill-in-epoch": ("batch", 1, 2),
        "stop-in-epoch": ("batch", 1, 1),
        "kill-at-epoch-end": ("epoch", 0),
        "stop-at-epoch-end": ("epoch", 0),
        "kill-in-validation": ("validation", 1, 4, 1),
        "stop-in-validation": ("validation", 1, 4, 0),
        "workers": ("batch", 1, 1),
    }
    assert not lacking and [one.name for one in found] == command.NAMES
    assert [one.workers for one in found if one.workers is not None] == [2]


def test_what_a_run_has_no_moment_for_is_said():
    found, lacking = command.planned(done(1, 4, 0, workers=None))
    assert [one.name for one in found] == ["kill-in-epoch", "stop-in-epoch"] and len(lacking) == 3


def test_what_a_run_says_of_itself():
    said = (
        "resuming from step 4: x\nresumed at step 4: the next step is that of before\nerror: no\n"
        "error: a [host b]\n"
    )
    ended = command.Ended(1, True, f"{said}last\n")
    assert (
        ended.verdict == "resumed at step 4: the next step is that of before"
        and ended.error == "error: a [host b]"
    )
    ended = command.Ended(
        1,
        True,
        f"warning: {said[24:]}Traceback (most recent call last):\n  File x\nKeyError: 'x'\n",
    )
    assert ended.verdict.startswith("warning: resumed at step 4: the next")
    assert (
        command.Ended(
            1, True, "Traceback (most recent call last):\n  File x\nKeyError: 'x'\n"
        ).error
        == "KeyError: 'x'"
    )
    assert command.Ended(0, True, "").verdict == ""


def test_the_working_folder_is_mirrored_and_not_written_to(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command, "COPIED", (10, 12))
    monkeypatch.setattr(command, "ENTRIES", 12)
    home, data, many, without = (
        tmp_path / "home" / name for name in ("", "data", "many", "drill-1")
    )
    for folder in (data, many, without, home / ".git"):
        folder.mkdir(parents=True)
    (data / "small").write_text("small")
    (data / "large").write_text("larger than ten bytes")
    (data / "tenth").write_text("10 letters")
    (home / "data/link").symlink_to("small")
    for number in range(12):
        (many / str(number)).touch()
    command.mirror(home, tmp_path / "copy", without)
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
    objects |= {"endless": made_of(one for one in [1, 2]), "long": made_of(iter(range(10**9)))}
    before = module_variables.variable_digests(objects, objects)
    counted([1, 2])
    for name in ("count", "endless", "long"):
        objects[name]()
    named = [
        "test_drill_comparison.SEEN",
        "test_drill_comparison.made_of.<locals>.<lambda>.iterator",
    ]
    assert (
        module_variables.changed_variables(
            before, module_variables.variable_digests(objects, objects)
        )
        == named
    )


def test_what_a_function_has_closed_over_is_named_where_no_checkpoint_has_it():
    total = 0

    def add():
        nonlocal total
        total += 1

    before = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    add()
    after = [module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})]
    assert module_variables.changed_variables(before[0], after[0]) == [
        f"test_drill_comparison.{add.__qualname__}.total"
    ]
    assert module_variables.changed_variables(before[1], after[1]) == []


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_a_loader_gets_another_number_of_workers(before, after):
    settings = {"persistent_workers": True, "timeout": 5, "prefetch_factor": 3} if before else {}
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=before, **settings)
    drilled_run._set_workers(loader, after)
    fresh = DataLoader(
        TensorDataset(torch.arange(8)),
        2,
        num_workers=after,
        **(settings if after and before else {}),
    )
    names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
    assert [getattr(loader, name) for name in names] == [getattr(fresh, name) for name in names]
    assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(8))
