"""What differs between two runs of the same job: steps, state, model, curves. Each is a folder that the drill made.

What two runs can never have in common is left out: moments, seconds, and how busy the machine was.
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

from sagemaker_lightning.callbacks.loggers import events
from sagemaker_lightning.contract.shutdown import newest_step
from sagemaker_lightning.resume.checkpoint_file import KEY, read
from sagemaker_lightning.state.object_state import digest

STEP = ("batch", "learning rate", "loss")
"""What is known of a step, in the order in which one leads to the next."""
WRITTEN = ("number", "saved_at", "made", "journal", "resumes", "files")
"""Of what is ours in a checkpoint: when and by which processes it was written."""
TRIES = ("begun", "workers")
"""Of what a checkpoint says of a loader: how often it was begun, each process counted, and by how many workers."""
PASSING = {"time_elapsed", "retired", "resumes"}
"""Of what callbacks and model.json say: Lightning's Timer's seconds, how many checkpoints ago a model was the best one,
and what came of earlier interruptions."""
MACHINES = "system"  # the folder of callbacks/host_metrics.py's curves
ABSENT = "nothing"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same."""

    kind: str
    """"batch", "learning rate", "loss", "steps", "state", "model", "metrics", "curve" or "file"."""
    words: str
    """What it is, and what was found in each of the two runs."""


def differences(alone: Path, other: Path) -> list[Difference]:
    """Return what is not the same in the `other` run's folder as in that of the run left alone, the cause first."""
    return [
        *_steps(alone, other),
        *_state(alone, other),
        *_models(alone, other),
        *_curves(alone, other),
    ]


def steps(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return what a rank has written down; a line that was not written to its end, as it was killed, is left out."""
    path = folder / f"steps-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _steps(alone: Path, other: Path) -> list[Difference]:
    """Return the first difference of the steps that were done, of any rank."""
    found = []
    ranks = len({path.name for folder in (alone, other) for path in folder.glob("steps-*.jsonl")})
    for rank in range(ranks):
        known, done = (
            [step for step in steps(folder, rank) if step["at"][0] == "batch"]
            for folder in (alone, other)
        )
        expected, seen = {tuple(step["at"]): step for step in known}, set()
        of = f" of rank {rank}" if ranks > 1 else ""
        for step in done:
            at = tuple(step["at"])
            place = f"step {step['step']}{of} (epoch {at[1]}, batch {at[2]})"
            seen.add(at)
            if at not in expected:
                found.append(
                    (at, Difference("steps", f"{place} was not done by the run left alone"))
                )
                break
            if wrong := next((name for name in STEP if step[name] != expected[at][name]), None):
                values = (
                    ""
                    if wrong == "batch"
                    else f": {_both(_number(expected[at][wrong]), _number(step[wrong]))}"
                )
                found.append((at, Difference(wrong, f"the {wrong} of {place}{values}")))
                break
        else:
            if missing := sorted(expected.keys() - seen):
                place = f"epoch {missing[0][1]}, batch {missing[0][2]}"
                found.append(
                    (
                        missing[0],
                        Difference("steps", f"{place}{of} was done by the run left alone only"),
                    )
                )
    return [difference for _, difference in sorted(found, key=lambda one: one[0])[:1]]


def _number(bits: str | list[str] | None) -> str:
    """Return a float's value, or those of several, in as many digits as tell it from any other one."""
    if isinstance(bits, list):
        return ", ".join(map(_number, bits))
    return ABSENT if bits is None else repr(float.fromhex(bits))


def _state(alone: Path, other: Path) -> list[Difference]:
    """Return how the last checkpoints differ."""
    one, two = (_last(folder / "ml/checkpoints") for folder in (alone, other))
    return _trees("state", "the last checkpoint", one, two)


def _last(folder: Path) -> dict[str, Any]:
    """Return what in the newest checkpoint is the job's state."""
    checkpoint = read(folder / f"step-{newest_step(folder):09d}.ckpt")
    ours = {name: value for name, value in checkpoint[KEY].items() if name not in WRITTEN}
    for rank in ours.get("ranks", ()):
        for loader in rank["held"]["loaders"]["loaders"]:
            for name in TRIES:
                loader.pop(name, None)
    return checkpoint | {KEY: ours}


def _models(alone: Path, other: Path) -> list[Difference]:
    """Return how the files of the model folders differ."""
    found = []
    folders = [folder / "ml/model" for folder in (alone, other)]
    for name in _names(*folders):
        paths = [folder / name for folder in folders]
        if missing := [path for path in paths if not path.is_file()]:
            which = "interrupted run" if missing == paths[1:] else "run left alone"
            found.append(Difference("file", f"{name} in the model folder: the {which} has none"))
        elif paths[0].read_bytes() != paths[1].read_bytes():
            contents = [_content(path) for path in paths]
            if None in contents:
                found.append(Difference("file", f"{name} in the model folder: its bytes"))
            else:
                found += _trees("metrics" if name == "model.json" else "model", name, *contents)
    return found


def _content(path: Path) -> Any:
    """Return the values in a file, None if it cannot be read as any."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        if path.suffix in (".pt", ".pth", ".ckpt"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever a user's file is
        return None
    return None


def _trees(kind: str, where: str, one: Any, two: Any) -> list[Difference]:
    """Return in one difference which of two trees' values differ."""
    found = list(_leaves(one, two, ()))
    if not found:
        return []
    (path, words), *more = found
    others = f" (and {len(more)} more)" if more else ""
    return [Difference(kind, f"{'.'.join(path)} in {where}: {words}{others}")]


def _leaves(one: Any, two: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each value that differs, and how."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in dict.fromkeys([*one, *two]):
            if key not in PASSING:
                yield from _leaves(one.get(key, ABSENT), two.get(key, ABSENT), (*path, str(key)))
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        for number, (left, right) in enumerate(zip_longest(one, two, fillvalue=ABSENT)):
            yield from _leaves(left, right, (*path, str(number)))
    elif digest(one) != digest(two):
        yield path, _how(one, two)


def _how(one: Any, two: Any) -> str:
    """Return how two values differ."""
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
        return _both(_short(one), _short(two))
    if one.shape != two.shape or one.dtype != two.dtype:
        return _both(*(f"{each.dtype} {list(each.shape)}" for each in (one, two)))
    if one.numel() == 1:
        return _both(repr(one.item()), repr(two.item()))
    apart = one.to_dense() != two.to_dense()
    return f"{int(apart.sum())} of {one.numel()} values"


def _both(alone: str, other: str) -> str:
    return f"{alone} left alone, {other} interrupted"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    text = value if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _curves(alone: Path, other: Path) -> list[Difference]:
    """Return the first difference of each curve: TensorBoard's, and the rows of CSV files."""
    found = []
    for read_all in (_tensorboard, _csv):
        one, two = read_all(alone), read_all(other)
        for name in dict.fromkeys([*one, *two]):
            rows = zip_longest(one.get(name, ()), two.get(name, ()), fillvalue=ABSENT)
            number, row = next(
                ((k, row) for k, row in enumerate(rows) if row[0] != row[1]), (0, None)
            )
            if row:
                found.append(
                    Difference("curve", f"{name}, row {number + 1}: {_both(*map(_short, row))}")
                )
    return found


def _tensorboard(folder: Path) -> dict[str, list]:
    """Return each curve's (step, value) in the order in which they were logged, by folder and tag."""
    curves: dict[str, list] = {}
    for path in sorted(folder.rglob("*.tfevents.*")):
        where = path.parent.relative_to(folder)
        if path.is_file() and MACHINES not in where.parts:
            for tag, step, value in events(path.read_bytes()):
                curves.setdefault(f"{where.as_posix()}: {tag}", []).append((step, value))
    return curves


def _csv(folder: Path) -> dict[str, list]:
    """Return the rows of each CSV file that the run has written."""
    found = {}
    for path in sorted(folder.rglob("*.csv")):
        if path.is_file() and not path.is_symlink():
            with path.open(newline="", errors="replace") as file:
                found[path.relative_to(folder).as_posix()] = list(csv.reader(file))
    return found


def _names(*folders: Path) -> list[str]:
    """Return the files below any of the folders, each once."""
    paths = [
        path.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    ]
    return sorted(set(paths))
