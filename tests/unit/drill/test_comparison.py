"""drill/comparison.py: what differs between two runs, and what differs first."""

import fractions
import json
from pathlib import Path

import pytest
import torch
from drilled_files import run_of

from sagemaker_lightning.drill import comparison
from sagemaker_lightning.resume.files import checkpoint_file

CHANGES = {
    "batch": ("bb", "batch", "the batch of step 2 (epoch 0, batch 1)"),
    "rates": (
        [0.2, 0.3],
        "learning rate",
        "the learning rate of step 2 (epoch 0, batch 1): 0.1 left alone, 0.2, 0.3 interrupted",
    ),
    "loss": (
        0.75,
        "loss",
        "the loss of step 2 (epoch 0, batch 1): 0.5 left alone, 0.75 interrupted",
    ),
    "steps": (3, "steps", "step 3 (epoch 0, batch 2) was not done by the run left alone"),
    "weight": (3.0, "state", "state_dict.w in the last checkpoint: 1 of 2 values"),
    "place": (
        9,
        "state",
        f"{checkpoint_file.ENTRIES_KEY}.ranks.0.loader_positions.loaders.0.place in the last "
        "checkpoint: 8 left alone, 9 interrupted",
    ),
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


def test_the_cause_in_a_step_is_named_before_its_effects(tmp_path: Path):
    alone = run_of(tmp_path / "alone", loss=None)
    other_run = run_of(tmp_path / "other", batch="bb", rates=[0.2])
    (difference,) = [
        difference
        for difference in comparison.differences(alone, other_run)
        if "of step" in difference.words
    ]
    assert difference.kind == "batch"
    other_run = run_of(tmp_path / "third")
    assert comparison.differences(alone, other_run)[0].words.endswith(
        ": nothing left alone, 0.5 interrupted"
    )


def test_a_step_that_is_lacking_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    assert comparison.differences(alone, run_of(tmp_path / "other", steps=1)) == [
        comparison.Difference("steps", "epoch 0, batch 1 was done by the run left alone only")
    ]


def write_losses(folder: Path, rank: int, *losses: float, again: int = 0) -> None:
    """Write what a rank recorded, with its first steps done `again`, as after a resumption."""
    steps = [
        {
            "at": ["batch", 0, batch],
            "step": batch + 1,
            "batch": "aa",
            "learning rate": [],
            "loss": loss.hex(),
        }
        for batch, loss in enumerate(losses)
    ]
    lines = [json.dumps(step) for step in steps[:again] + steps]
    (folder / f"steps-{rank}.jsonl").write_text("\n".join(lines))


def test_the_first_difference_of_all_ranks_is_named(tmp_path: Path):
    alone, other_run = (run_of(tmp_path / name) for name in ("alone", "other"))
    for rank in range(2):
        write_losses(alone, rank, 0.1, 0.2, 0.3)
        write_losses(other_run, rank, 0.1, 0.2, 0.3, again=2)
    assert comparison.differences(alone, other_run) == []
    write_losses(other_run, 0, 0.1, 0.2, 0.4)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("the loss of step 3 of rank 0 (epoch 0, batch 2): 0.3 left")
    write_losses(other_run, 1, 0.1, 0.4, 0.3)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("the loss of step 2 of rank 1 (epoch 0, batch 1): 0.2 left")
    (other_run / "steps-1.jsonl").unlink()
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words == "epoch 0, batch 0 of rank 1 was done by the run left alone only"
    write_losses(alone, 1)
    write_losses(other_run, 0, 0.1, 0.2, 0.3, 0.4)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("step 4 of rank 0 (epoch 0, batch 3) was not done by")


TREES = {
    "shapes": (
        torch.zeros(2),
        torch.zeros(3),
        "a in x.pt: torch.float32 [2] left alone, torch.float32 [3] interrupted",
    ),
    "types": (
        torch.zeros(2),
        torch.zeros(2, dtype=torch.float64),
        "a in x.pt: torch.float32 [2] left alone, torch.float64 [2] interrupted",
    ),
    "one value": (torch.ones(1), torch.zeros(1), "a in x.pt: 1.0 left alone, 0.0 interrupted"),
    "many values": (torch.ones(3, 2), torch.eye(3, 2), "a in x.pt: 4 of 6 values"),
    "no tensor": (
        torch.zeros(2),
        [],
        "a in x.pt: torch.float32 [2] left alone, [] interrupted",
    ),
    "a list": ([1, 2], [1], "a.1 in x.pt: 2 left alone, nothing interrupted"),
    "keys": ({"b": 1}, {"c": 1}, "a.b in x.pt: 1 left alone, nothing interrupted (and 1 more)"),
    "keys and none": ({"b": 1}, 3, "a in x.pt: {'b': 1} left alone, 3 interrupted"),
    "texts": (
        "x" * 58,
        "x" * 59,
        f"a in x.pt: '{'x' * 58}' left alone, '{'x' * 56}... interrupted",
    ),
    "times": ({"time_elapsed": 1, "retired": 1}, {"time_elapsed": 2, "retired": 2}, None),
}


@pytest.mark.parametrize("case", TREES)
def test_how_the_values_of_two_files_differ(tmp_path: Path, case: str):
    left, right, words = TREES[case]
    runs = [tmp_path / name for name in ("alone", "other")]
    names = ("x.ckpt", "x.pt", "x.pth")
    for run, value in zip(runs, (left, right), strict=True):
        (run / "ml/model").mkdir(parents=True)
        for name in names:
            torch.save({"a": value}, run / "ml/model" / name)
    assert comparison._compare_models(*runs) == [
        comparison.Difference("model", words.replace("x.pt", name)) for name in names if words
    ]


def test_files_without_values_differ_by_their_bytes(tmp_path: Path):
    """Objects that a file asks for are not made."""
    runs = [tmp_path / name for name in ("alone", "other")]
    for number, (text, run) in enumerate(zip(("1", "{"), runs, strict=True)):
        (run / "ml/model").mkdir(parents=True, exist_ok=True)
        for name in ("broken.json", "broken.pt", "x.bin"):
            (run / "ml/model" / name).write_text(text)
        torch.save({"a": fractions.Fraction(number)}, run / "ml/model/objects.pt")
    assert comparison._compare_models(*runs) == [
        comparison.Difference("file", f"{name} in the model folder: its bytes")
        for name in ("broken.json", "broken.pt", "objects.pt", "x.bin")
    ]


def test_a_row_too_many_is_named_and_a_link_is_not_read(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other")
    for run, text in ((alone, "1"), (other_run, "2")):
        (tmp_path / f"data-{text}.csv").write_text(text)
        (run / "work/data.csv").symlink_to(tmp_path / f"data-{text}.csv")
    assert comparison.differences(alone, other_run) == []
    with (other_run / "work/rows.csv").open("a") as file:
        file.write("2,5\n")
    assert comparison.differences(alone, other_run) == [
        comparison.Difference(
            "curve", "work/rows.csv, row 3: nothing left alone, ['2', '5'] interrupted"
        )
    ]


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
