"""Compares all pairs of rows by cosine similarity.

Each host compares its rows with all rows that it has.

    docker run -e SAGEMAKER_PROGRAM=app/similarity.py IMAGE train    as a job's program
    python app/similarity.py --input rows.npy --top_k 10             on a desk

A job's hyperparameters are the flags. The result depends on them:

top_k: for each row, its nearest other rows and their scores, the best first: `neighbours`, int64,
and `scores`, float32, both [rows, top_k].
threshold: all pairs with a score of at least this: `counts`, int64 [rows], and as many entries in
`neighbours` and `scores`, by number.
dense: all scores, float32 [rows, all rows].
"""

if __name__ == "__main__":  # first of all: the imports below take seconds
    from sagemaker_lightning.process.start import before_torch

    before_torch()

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch

from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.rows import job
from sagemaker_lightning.rows.table import Table

# The maximum of this many columns is taken first: sorting all scores would take longer than
# computing them.
GROUP_COLUMNS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Similarity:
    """Cosine similarity of rows with all rows.

    Args:
        top_k: How many neighbours of each row.
        threshold: Instead: all pairs whose score is at least this.
        dense: Instead: all scores.
        precision: That of the products; sums are float32.
        itself: Whether a row is a neighbour of itself.
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
                f"--{chosen[0]}, --{chosen[1]}: found both, expected one of top_k, threshold and "
                "dense"
            )
        for name, least in (("top_k", 1), ("memory", 0.01)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"--{name}: found {value}, expected {least} or more")
        if self.threshold is not None and not -1 <= self.threshold <= 1:
            raise UserError(f"--threshold: found {self.threshold}, expected -1 to 1")


class Compared:
    """Compares rows of a table with all its rows, on one device."""

    def __init__(self, settings: Similarity, table: Table, device: torch.device) -> None:
        if settings.top_k and settings.top_k > len(table) - (not settings.itself):
            raise UserError(
                f"--top_k: found {settings.top_k}, expected 1 to "
                f"{len(table) - (not settings.itself)}: there are {len(table)} rows"
            )
        self.settings = settings
        self.table = table
        self.device = device
        self.kind = DTYPES[settings.precision]
        self.whole: torch.Tensor | None = None
        budget = settings.memory * 2**30
        table_bytes = len(table) * table.columns * self.kind.itemsize
        if table_bytes <= budget / 2:  # all rows fit, and stay on the device
            self.whole = torch.cat(
                [self._unit_vectors(rows) for rows in _ranges(len(table), 2**14)]
            )
            budget -= table_bytes
        self.width = min(2**15, len(table))
        result_bytes = (
            4 * settings.top_k
            if settings.top_k
            else 8 * len(table)
            if settings.dense
            else 64 * len(table)
        )
        # With a threshold, this assumes that all pairs are above it.
        bytes_per_row = 4 * (2 * self.width + 4 * table.columns) + result_bytes
        self.size = max(1, min(1024, int(budget / 2 / bytes_per_row)))
        """Rows of a block that fit into the memory."""

    def __call__(self, rows: range) -> dict[str, np.ndarray]:
        """Return the result for a block of rows, as the module's docstring says."""
        with torch.inference_mode():
            compared = (
                self._unit_vectors(rows)
                if self.whole is None
                else self.whole[rows.start : rows.stop]
            )
            scores = self._score_tiles(compared, rows)
            if self.settings.top_k:
                result = nearest(scores, self.settings.top_k)
            elif self.settings.threshold is not None:
                result = above(scores, self.settings.threshold, len(rows))
            else:
                result = {"scores": torch.cat([tile for _, tile in scores], dim=1)}
        return {name: tensor.cpu().numpy() for name, tensor in result.items()}

    def _score_tiles(
        self, compared: torch.Tensor, rows: range
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first column, scores) until all columns are done.

        The scores are float32 [rows, columns]. The score of a row with itself is -inf, unless
        `itself` or `dense` is set.
        """
        for columns in _ranges(len(self.table), self.width):
            others = (
                self._unit_vectors(columns)
                if self.whole is None
                else self.whole[columns.start : columns.stop]
            )
            scores = (compared @ others.T).float()
            if not (self.settings.itself or self.settings.dense):
                scores.diagonal(rows.start - columns.start).fill_(-torch.inf)
            yield columns.start, scores

    def _unit_vectors(self, rows: range) -> torch.Tensor:
        """Return rows on the device, scaled to length 1.

        UserError names the first row that is all 0.
        """
        vectors = torch.from_numpy(self.table[rows]).to(self.device)
        # Divided by the greatest number first: the squares of float32's greatest numbers are
        # infinite.
        greatest = vectors.abs().amax(1, keepdim=True)
        if not greatest.all():
            row = rows.start + int((greatest[:, 0] == 0).nonzero()[0])
            raise UserError(
                f"{self.table.channel}: row {row} is all 0, which has no direction; expected "
                "other rows"
            )
        vectors /= greatest
        return (vectors / vectors.norm(dim=1, keepdim=True)).to(self.kind)


def nearest(tiles: Iterator[tuple[int, torch.Tensor]], k: int) -> dict[str, torch.Tensor]:
    """Return the k best columns of each row, the best first, and their scores.

    Columns with equal scores are in the order of their numbers. `tiles` are (first column, scores
    [rows, columns]).
    """
    best = best_columns = None
    for first, scores in tiles:
        candidates, columns = best_of(scores, k)
        columns = columns + first
        if best is not None:
            candidates = torch.cat([best, candidates], 1)
            columns = torch.cat([best_columns, columns], 1)
        best, index = candidates.topk(min(k, candidates.shape[1]), 1)
        best_columns = columns.gather(1, index)
    best_columns, order = best_columns.sort(1)
    best, index = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return {"neighbours": best_columns.gather(1, index), "scores": best}


def best_of(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k greatest scores of each row, in any order, and their columns.

    There are fewer if there are fewer columns. Only the k groups of columns with the greatest
    maxima, and the columns that fill no group, have to be searched.
    """
    rows, columns = scores.shape
    groups = columns // GROUP_COLUMNS
    if groups <= k:
        return scores.topk(min(k, columns), 1)
    grouped = scores[:, : groups * GROUP_COLUMNS].unflatten(1, (groups, GROUP_COLUMNS))
    groups_chosen = grouped.amax(2).topk(k, 1, sorted=False).indices[:, :, None]
    index = (
        groups_chosen * GROUP_COLUMNS + torch.arange(GROUP_COLUMNS, device=scores.device)
    ).flatten(1)
    rest = torch.arange(groups * GROUP_COLUMNS, columns, device=scores.device).expand(rows, -1)
    index = torch.cat([index, rest], 1)
    best, positions = scores.gather(1, index).topk(k, 1)
    return best, index.gather(1, positions)


def above(
    tiles: Iterator[tuple[int, torch.Tensor]], threshold: float, rows: int
) -> dict[str, torch.Tensor]:
    """Return each row's columns whose score is `threshold` or more, and the scores.

    The result has the number of such columns of each row (`counts`), and the entries row by row,
    within a row by number. `tiles` are (first column, scores [rows, columns]).
    """
    entries = []
    for first, scores in tiles:
        row, column = (scores >= threshold).nonzero(as_tuple=True)
        entries.append((row, column + first, scores[row, column]))
    row, column, score = (torch.cat(parts) for parts in zip(*entries, strict=True))
    order = row.argsort(stable=True)
    counts = torch.bincount(row, minlength=rows)
    return {"counts": counts, "neighbours": column[order], "scores": score[order]}


def _ranges(total: int, size: int) -> Iterator[range]:
    for first in range(0, total, size):
        yield range(first, min(first + size, total))


def main(args: list[str] | None = None) -> None:
    """Compare the rows of a job's channel, or of --input."""
    with reported(failure_file(), host_and_rank()):
        environment = SageMakerEnvironment.read()
        parser = job.parser(__doc__)
        parser.add_class_arguments(Similarity)
        arguments = job.parse(parser, environment, args)
        settings = {field.name: getattr(arguments, field.name) for field in fields(Similarity)}
        similarity = Similarity(**settings)
        table = job.read(environment, arguments)
        # "numbers" names the results that are row numbers: when hosts with files of their own are
        # merged, rows get new numbers.
        deciding_settings = {
            name: value for name, value in vars(similarity).items() if name != "memory"
        }
        deciding_settings |= {
            "program": "similarity",
            "numbers": [] if similarity.dense else ["neighbours"],
        }
        job.run(
            environment,
            table,
            arguments,
            deciding_settings,
            lambda device: Compared(similarity, table, device),
        )


if __name__ == "__main__":
    main()
