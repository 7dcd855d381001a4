"""All pairs of rows compared by cosine similarity: each host does its rows, against all rows it has.

    docker run -e SAGEMAKER_PROGRAM=app/similarity.py IMAGE train          as a job's program; flags are hyperparameters
    python app/similarity.py --input rows.npy --top_k 10                   on a desk

Result: by row, the `top_k` nearest other rows and their scores (`neighbours`, int64, and `scores`, float32, both
[rows, top_k], the best first); with `threshold`, all pairs at or above it (`counts`, int64 [rows], and as many entries
in `neighbours` and `scores`, by number); with `dense`, all scores ([rows, all rows], float32).
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from sagemaker_lightning.process.start import before_torch

    before_torch()

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch

from sagemaker_lightning.contract.environment import Environment, failure_file, place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.rows import job
from sagemaker_lightning.rows.table import Table

GROUP = 64  # of so many columns, the maximum is taken first: sorting all scores would take longer than computing them
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Similarity:
    """Cosine similarity of rows with all rows.

    Args:
        top_k: How many neighbours of each row.
        threshold: Instead: all pairs whose score is at least this.
        dense: Instead: all scores.
        precision: Of the products; sums are float32.
        itself: Whether a row is a neighbour of its own.
        memory: GiB that scores, results and the rows that are compared may take, on each device.
    """

    top_k: int | None = None
    threshold: float | None = None
    dense: bool = False
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    itself: bool = False
    memory: float = 1.0

    def __post_init__(self) -> None:
        chosen = [name for name in ("top_k", "threshold") if getattr(self, name) is not None] + [
            "dense"
        ] * self.dense
        if not chosen:
            self.top_k = 10
        if len(chosen) > 1:
            raise UserError(
                f"--{chosen[0]}, --{chosen[1]}: found both, allowed is one of top_k, threshold and "
                "dense"
            )
        for name, least in (("top_k", 1), ("memory", 0.01)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"--{name}: found {value}, allowed is {least} or more")
        if self.threshold is not None and not -1 <= self.threshold <= 1:
            raise UserError(f"--threshold: found {self.threshold}, allowed is -1 to 1")


class Compared:
    """The rows of a table against all of them, on one device."""

    def __init__(self, settings: Similarity, table: Table, device: torch.device) -> None:
        if settings.top_k and settings.top_k > len(table) - (not settings.itself):
            raise UserError(
                f"--top_k: found {settings.top_k}, allowed is 1 to "
                f"{len(table) - (not settings.itself)}: there are {len(table)} rows"
            )
        self.settings = settings
        self.table = table
        self.device = device
        self.kind = KINDS[settings.precision]
        self.whole: torch.Tensor | None = None
        budget = settings.memory * 2**30
        size = len(table) * table.columns * self.kind.itemsize
        if size <= budget / 2:  # all rows stay on the device
            self.whole = torch.cat([self._unit(rows) for rows in _pieces(len(table), 2**14)])
            budget -= size
        self.width = min(2**15, len(table))
        result = (
            4 * settings.top_k
            if settings.top_k
            else 8 * len(table)
            if settings.dense
            else 64 * len(table)
        )
        # Bytes; of a threshold, if all pairs are above it.
        per_row = 4 * (2 * self.width + 4 * table.columns) + result
        self.size = max(1, min(1024, int(budget / 2 / per_row)))
        """Rows of a block that fit into the memory."""

    def __call__(self, rows: range) -> dict[str, np.ndarray]:
        """Return the result of a block of rows; see above."""
        with torch.inference_mode():
            some = self._unit(rows) if self.whole is None else self.whole[rows.start : rows.stop]
            scores = self._scores(some, rows)
            if self.settings.top_k:
                found = nearest(scores, self.settings.top_k)
            elif self.settings.threshold is not None:
                found = above(scores, self.settings.threshold, len(rows))
            else:
                found = {"scores": torch.cat([tile for _, tile in scores], dim=1)}
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def _scores(self, some: torch.Tensor, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first column, scores, float32 [rows, columns]) of all columns; -inf is that of a row with itself."""
        for columns in _pieces(len(self.table), self.width):
            others = (
                self._unit(columns)
                if self.whole is None
                else self.whole[columns.start : columns.stop]
            )
            scores = (some @ others.T).float()
            if not (self.settings.itself or self.settings.dense):
                first = max(rows.start, columns.start)
                last = min(rows.stop, columns.stop)
                if first < last:
                    own = torch.arange(first, last, device=self.device)
                    scores[own - rows.start, own - columns.start] = -torch.inf
            yield columns.start, scores

    def _unit(self, rows: range) -> torch.Tensor:
        """Return rows of length 1 on the device; UserError names the first row that is all 0."""
        found = torch.from_numpy(self.table[rows]).to(self.device)
        # By the greatest number first: squares of numbers as great as float32 has are infinite.
        greatest = found.abs().amax(1, keepdim=True)
        if not greatest.all():
            row = rows.start + int((greatest[:, 0] == 0).nonzero()[0])
            raise UserError(
                f"{self.table.channel}: row {row} is all 0, which has no direction; allowed are "
                "other rows"
            )
        found /= greatest
        return (found / found.norm(dim=1, keepdim=True)).to(self.kind)


def nearest(tiles: Iterator[tuple[int, torch.Tensor]], k: int) -> dict[str, torch.Tensor]:
    """Return the numbers and scores of the k best columns of each row, the best first, equal ones by number.

    `tiles` are (first column, scores [rows, columns]).
    """
    best = numbers = None
    for first, scores in tiles:
        found, columns = best_of(scores, k)
        columns = columns + first
        if best is not None:
            found = torch.cat([best, found], 1)
            columns = torch.cat([numbers, columns], 1)
        best, place = found.topk(min(k, found.shape[1]), 1)
        numbers = columns.gather(1, place)
    numbers, order = numbers.sort(1)
    best, place = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return {"neighbours": numbers.gather(1, place), "scores": best}


def best_of(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k greatest scores of each row, in any order, and their columns; fewer if there are fewer columns.

    They are in the k groups of columns whose maxima are greatest, which is all that has to be looked through.
    """
    rows, columns = scores.shape
    groups = columns // GROUP
    if groups <= k:
        return scores.topk(min(k, columns), 1)
    grouped = scores[:, : groups * GROUP].unflatten(1, (groups, GROUP))
    chosen = grouped.amax(2).topk(k, 1, sorted=False).indices[:, :, None]
    index = (chosen * GROUP + torch.arange(GROUP, device=scores.device)).flatten(1)
    rest = torch.arange(groups * GROUP, columns, device=scores.device).expand(rows, -1)
    index = torch.cat([index, rest], 1)
    found, place = scores.gather(1, index).topk(k, 1)
    return found, index.gather(1, place)


def above(
    tiles: Iterator[tuple[int, torch.Tensor]], threshold: float, rows: int
) -> dict[str, torch.Tensor]:
    """Return how many columns of each row have a score of `threshold` or more, their numbers and their scores.

    The entries come row by row, in a row by number. `tiles` are (first column, scores [rows, columns]).
    """
    found = []
    for first, scores in tiles:
        row, column = (scores >= threshold).nonzero(as_tuple=True)
        found.append((row, column + first, scores[row, column]))
    row, column, score = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = row.argsort(stable=True)
    counts = torch.bincount(row, minlength=rows)
    return {"counts": counts, "neighbours": column[order], "scores": score[order]}


def _pieces(total: int, size: int) -> Iterator[range]:
    for first in range(0, total, size):
        yield range(first, min(first + size, total))


def main(args: list[str] | None = None) -> None:
    """Compare the rows of a job's channel, or of --input."""
    with reported(failure_file(), place()):
        environment = Environment.read()
        made = job.parser(__doc__)
        made.add_class_arguments(Similarity)
        given = job.parse(made, environment, args)
        settings = {field.name: getattr(given, field.name) for field in fields(Similarity)}
        chosen = Similarity(**settings)
        table = job.read(environment, given)
        # Where numbers are of rows: merging hosts that have files of their own numbers them anew.
        decisive = {name: value for name, value in vars(chosen).items() if name != "memory"}
        decisive |= {"program": "similarity", "numbers": [] if chosen.dense else ["neighbours"]}
        job.run(environment, table, given, decisive, lambda device: Compared(chosen, table, device))


if __name__ == "__main__":
    main()
