"""Compares two runs of the same job: their steps, state, model files and curves.

Each run is a folder that the drill made. What no two runs have in common is left out: times of day,
durations, and how busy the machine was.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sagemaker_lightning.callbacks.loggers.tensorboard_events import read_events
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY, read
from sagemaker_lightning.state.digests import digest

STEP_ENTRIES = ("batch", "learning rate", "loss")
"""What is recorded of a step, in the order in which one follows from another."""
WRITER_ENTRIES = ("number", "journal", "resumes")
"""Our entries in a checkpoint that say when and by which processes it was written; not compared."""
LOADER_PROCESS_ENTRIES = ("begun", "workers")
"""Entries for a loader that depend on the processes; not compared.

How often the loader was begun, each process counted, and with how many workers.
"""
CHANGING_ENTRIES = {"time_elapsed", "retired", "resumes", "event_files"}
"""Entries of callbacks, loggers and model.json that are not compared.

The seconds of Lightning's Timer, how many checkpoints ago a model was the best one, how earlier
interruptions were resumed, and the files of TensorBoard: each process has its own.
"""
# The folder of the curves that callbacks/host_metrics.py logs.
HOST_METRICS_FOLDER = "system"
ABSENT = "nothing"


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in two runs."""

    kind: str
    """"batch", "learning rate", "loss", "steps", "state", "model", "metrics", "curve" or "file"."""
    words: str
    """Where the difference is, and what each of the two runs has there."""


def differences(alone: Path, other: Path) -> list[Difference]:
    """Compare the folder of an interrupted run with that of the run left alone.

    Causes come before their consequences: steps, state, model files, curves.
    """
    return [
        *_compare_steps(alone, other),
        *_compare_states(alone, other),
        *_compare_models(alone, other),
        *_compare_curves(alone, other),
    ]


def steps(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the steps that one rank recorded.

    A line that is incomplete, because the process was killed while it wrote, is left out.
    """
    path = folder / f"steps-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    recorded = []
    for line in lines:
        try:
            recorded.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return recorded


def _compare_steps(alone: Path, other: Path) -> list[Difference]:
    """Return the first step of any rank that differs, in a list of at most one."""
    differences = []
    ranks = len({path.name for folder in (alone, other) for path in folder.glob("steps-*.jsonl")})
    for rank in range(ranks):
        done_alone, done_other = (
            [step for step in steps(folder, rank) if step["at"][0] == "batch"]
            for folder in (alone, other)
        )
        expected = {tuple(step["at"]): step for step in done_alone}
        done_positions = set()
        rank_note = f" of rank {rank}" if ranks > 1 else ""
        for step in done_other:
            position = tuple(step["at"])
            where = f"step {step['step']}{rank_note} (epoch {position[1]}, batch {position[2]})"
            done_positions.add(position)
            if position not in expected:
                differences.append(
                    (position, Difference("steps", f"{where} was not done by the run left alone"))
                )
                break
            if quantity := next(
                (name for name in STEP_ENTRIES if step[name] != expected[position][name]), None
            ):
                values = ""
                if quantity != "batch":
                    value_alone = _format_floats(expected[position][quantity])
                    value_other = _format_floats(step[quantity])
                    values = f": {_format_both(value_alone, value_other)}"
                words = f"the {quantity} of {where}{values}"
                differences.append((position, Difference(quantity, words)))
                break
        else:
            if missing := sorted(expected.keys() - done_positions):
                where = f"epoch {missing[0][1]}, batch {missing[0][2]}"
                differences.append(
                    (
                        missing[0],
                        Difference(
                            "steps", f"{where}{rank_note} was done by the run left alone only"
                        ),
                    )
                )
    return [difference for _, difference in sorted(differences, key=lambda pair: pair[0])[:1]]


def _format_floats(bits: str | list[str] | None) -> str:
    """Return one or more floats, given as hex, with the digits that identify them."""
    if isinstance(bits, list):
        return ", ".join(map(_format_floats, bits))
    return ABSENT if bits is None else repr(float.fromhex(bits))


def _compare_states(alone: Path, other: Path) -> list[Difference]:
    """Return how the last checkpoints differ, as a list of at most one difference."""
    state_alone, state_other = (
        _read_last_state(folder / "ml/checkpoints") for folder in (alone, other)
    )
    return _compare_trees("state", "the last checkpoint", state_alone, state_other)


def _read_last_state(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint without what differs between any two runs."""
    home = CheckpointHome(folder)
    checkpoint = read(home.path_of(home.steps()[-1]))
    ours = {
        name: value for name, value in checkpoint[ENTRIES_KEY].items() if name not in WRITER_ENTRIES
    }
    # The files that there are, and the epoch in which the data were made, are of processes, too.
    ours.get("parts", {}).pop("model_files", None)
    for rank in ours.get("ranks", ()):
        rank["data_epoch"].pop("made", None)
        for loader in rank["loader_positions"]["loaders"]:
            for name in LOADER_PROCESS_ENTRIES:
                loader.pop(name, None)
    return checkpoint | {ENTRIES_KEY: ours}


def _compare_models(alone: Path, other: Path) -> list[Difference]:
    """Return how the files of the model folders differ."""
    differences = []
    folders = [folder / "ml/model" for folder in (alone, other)]
    for name in _file_names(*folders):
        paths = [folder / name for folder in folders]
        if missing := [path for path in paths if not path.is_file()]:
            which = "interrupted run" if missing == paths[1:] else "run left alone"
            differences.append(
                Difference("file", f"{name} in the model folder: the {which} has none")
            )
        elif paths[0].read_bytes() != paths[1].read_bytes():
            contents = [_read_values(path) for path in paths]
            if None in contents:
                differences.append(Difference("file", f"{name} in the model folder: its bytes"))
            else:
                differences += _compare_trees(
                    "metrics" if name == "model.json" else "model", name, *contents
                )
    return differences


def _read_values(path: Path) -> Any:
    """Return the values in a file; None if its format is unknown or it cannot be read."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        if path.suffix in (".pt", ".pth", ".ckpt"):
            return torch.load(path, map_location="cpu", weights_only=True)
    # A user's file may be anything.
    except Exception:
        return None
    return None


def _compare_trees(kind: str, where: str, alone: Any, other: Any) -> list[Difference]:
    """Return a difference that lists the values of two trees that differ, if any do."""
    leaves = list(_differing_leaves(alone, other, ()))
    if not leaves:
        return []
    (path, words), *more = leaves
    others = f" (and {len(more)} more)" if more else ""
    return [Difference(kind, f"{'.'.join(path)} in {where}: {words}{others}")]


def _differing_leaves(
    alone: Any, other: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each value that differs, and a description of the difference."""
    if isinstance(alone, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*alone, *other]):
            if key not in CHANGING_ENTRIES:
                yield from _differing_leaves(
                    alone.get(key, ABSENT), other.get(key, ABSENT), (*path, str(key))
                )
    elif isinstance(alone, (list, tuple)) and isinstance(other, (list, tuple)):
        for number, (left, right) in enumerate(zip_longest(alone, other, fillvalue=ABSENT)):
            yield from _differing_leaves(left, right, (*path, str(number)))
    elif digest(alone) != digest(other):
        yield path, _describe_difference(alone, other)


def _describe_difference(alone: Any, other: Any) -> str:
    """Describe how two values differ."""
    if not (isinstance(alone, Tensor) and isinstance(other, Tensor)):
        return _format_both(_shorten(alone), _shorten(other))
    if alone.shape != other.shape or alone.dtype != other.dtype:
        return _format_both(*(f"{each.dtype} {list(each.shape)}" for each in (alone, other)))
    if alone.numel() == 1:
        return _format_both(repr(alone.item()), repr(other.item()))
    apart = alone.to_dense() != other.to_dense()
    return f"{int(apart.sum())} of {alone.numel()} values"


def _format_both(alone: str, other: str) -> str:
    return f"{alone} left alone, {other} interrupted"


def _shorten(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    text = value if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compare_curves(alone: Path, other: Path) -> list[Difference]:
    """Return the first difference of each curve (TensorBoard) and of each CSV file."""
    differences = []
    for read_all in (_read_tensorboard, _read_csv):
        curves_alone = read_all(alone)
        curves_other = read_all(other)
        for name in dict.fromkeys([*curves_alone, *curves_other]):
            rows = zip_longest(
                curves_alone.get(name, ()), curves_other.get(name, ()), fillvalue=ABSENT
            )
            for number, row in enumerate(rows, 1):
                if row[0] != row[1]:
                    words = f"{name}, row {number}: {_format_both(*map(_shorten, row))}"
                    differences.append(Difference("curve", words))
                    break
    return differences


def _read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return each curve's (step, value) pairs in logging order, by folder and tag."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("*.tfevents.*")):
        where = path.parent.relative_to(folder)
        if path.is_file() and HOST_METRICS_FOLDER not in where.parts:
            for tag, step, value in read_events(path.read_bytes()):
                curves.setdefault(f"{where.as_posix()}: {tag}", []).append((step, value))
    return curves


def _read_csv(folder: Path) -> dict[str, list[list[str]]]:
    """Return the rows of each CSV file that the run wrote, by path."""
    tables = {}
    for path in sorted(folder.rglob("*.csv")):
        if path.is_file() and not path.is_symlink():
            with path.open(newline="", errors="replace") as file:
                tables[path.relative_to(folder).as_posix()] = list(csv.reader(file))
    return tables


def _file_names(*folders: Path) -> list[str]:
    """Return the relative paths of all files below the folders, sorted, each once."""
    paths = [
        path.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    ]
    return sorted(set(paths))
