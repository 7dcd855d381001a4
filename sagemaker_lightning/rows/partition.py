"""Decides which rows each host computes, in a job whose hosts do not communicate.

Divides rows among hosts, devices, files and instance groups. Nothing here reads a file or an
environment variable: equal arguments give equal parts on every host.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from sagemaker_lightning.contract.errors import UserError


def rows(total: int, hosts: int, host: int) -> range:
    """Return the rows of one host, from round(host * total / hosts) on.

    Args:
        total: Number of rows.
        hosts: Number of hosts.
        host: The host's number, 0 to `hosts` - 1.

    All hosts together have every row once, in the order of their numbers. Halves are rounded to
    even, as Python does.
    """
    if total < 0 or not 0 <= host < hosts:
        raise ValueError(
            f"rows: host {host} of {hosts}, {total} rows; expected a host below {hosts}, rows "
            "from 0"
        )
    return range(round(host * total / hosts), round((host + 1) * total / hosts))


def weighted(total: int, weights: Sequence[float]) -> list[range]:
    """Return the rows of each host, out of `total`, in proportion to its weight.

    With equal weights the result is that of `rows`. Raises UserError for a negative weight, or if
    none is above 0.
    """
    exact = [Fraction(weight) for weight in weights]
    if total < 0 or not exact or min(exact) < 0 or not sum(exact):
        raise UserError(
            f"weights: found {list(weights)} for {total} rows; expected numbers from 0, one "
            "above it"
        )
    bounds = [0]
    reached = Fraction(0)
    for weight in exact:
        reached += weight
        bounds.append(round(total * reached / sum(exact)))
    return [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]


def devices(part: range, count: int) -> list[range]:
    """Return the rows of each of a host's `count` devices, out of the host's `part`."""
    return [
        part[piece.start : piece.stop]
        for piece in (rows(len(part), count, device) for device in range(count))
    ]


def groups(
    total: int, hosts: Mapping[str, Sequence[str]], weights: Mapping[str, float]
) -> dict[str, range]:
    """Return the rows of each host of some instance groups, by the host's name.

    Args:
        total: Number of rows.
        hosts: The names of each group's hosts.
        weights: What a host of each group can do, as a multiple of the others.

    Raises UserError if a group has no weight.
    """
    if missing := [name for name in hosts if name not in weights]:
        raise UserError(
            f"weights: found none for the instance group {missing[0]}; expected one for each group"
        )
    order = sorted((host, name) for name, members in hosts.items() for host in members)
    parts = weighted(total, [weights[name] for _, name in order])
    return {host: part for (host, _), part in zip(order, parts, strict=True)}


def files(counts: Mapping[str, int]) -> dict[str, range]:
    """Return the rows of each of a host's own files (ShardedByS3Key), by file name.

    The rows are numbered through all files, in the order of their names. The numbers are this
    host's own: it does not know how many rows the files of other hosts have.
    """
    rows_by_file = {}
    next_row = 0
    for name in sorted(counts):
        rows_by_file[name] = range(next_row, next_row + counts[name])
        next_row += counts[name]
    return rows_by_file


def missing(part: range, done: Sequence[range]) -> list[range]:
    """Return the ranges of `part` that no range in `done` covers, in order.

    The ranges in `done` may overlap and reach beyond `part`.
    """
    pieces = []
    reached = part.start
    for piece in sorted(filter(len, done), key=lambda piece: piece.start):
        pieces.append(range(reached, min(piece.start, part.stop)))
        reached = max(reached, piece.stop)
    pieces.append(range(reached, part.stop))
    return [piece for piece in pieces if len(piece)]
