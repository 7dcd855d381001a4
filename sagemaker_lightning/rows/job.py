"""A job whose hosts split the rows of a table and do not talk: each computes its own, in blocks that survive a stop.

    docker run -e SAGEMAKER_PROGRAM=app/split.py IMAGE train        with the hyperparameter function=mine.compute
    python app/split.py --function mine.compute --input rows.npy    on a desk

The function gets a block, float32 [n, columns], and returns an array whose first dimension is n, or several by name. A
function that sees all rows needs a program of its own, with the parts of this one: app/similarity.py is one.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser

from sagemaker_lightning.cli import mistakes
from sagemaker_lightning.contract import hyperparameters
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.environment import Environment, failure_file, place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported, write
from sagemaker_lightning.contract.shutdown import SIGNALS, status, words
from sagemaker_lightning.process import allocator, start_notice, threads
from sagemaker_lightning.rows import partition, parts
from sagemaker_lightning.rows.blocks import Blocks, compute
from sagemaker_lightning.rows.table import Table

Function = Callable[[range], Any]


def parser(manual: str) -> ArgumentParser:
    """Return a parser with the flags that every such job has."""
    made = ArgumentParser(description=manual, exit_on_error=False, allow_abbrev=False)
    made.add_argument(
        "--input",
        type=str,
        help="folder or file of the rows, .npy or .parquet (default: the channel)",
    )
    made.add_argument("--rows", type=int, help="how many rows there must be, if that is known")
    made.add_argument(
        "--block_rows", type=int, help="rows of a block at most (default: as the memory has it)"
    )
    made.add_argument(
        "--weights",
        type=dict[str, float],
        help="what a host of each instance group can do: {group: n}",
    )
    return made


def parse(made: ArgumentParser, environment: Environment, args: list[str] | None) -> Any:
    """Return the flags; UserError says in one line which is wrong."""
    if args is None and environment.user_args == tuple(sys.argv[1:]):
        args = hyperparameters.flags(environment.hyperparameters)
    try:
        found = made.parse_args(args)
    except ArgumentError as error:
        words = sys.argv[1:] if args is None else args
        raise UserError(
            mistakes.explain_all(made, words) or mistakes.explain(error, made)
        ) from None
    for name in ("rows", "block_rows"):
        if getattr(found, name) is not None and getattr(found, name) < 1:
            raise UserError(f"--{name}: found {getattr(found, name)}, allowed is 1 or more")
    return found


def read(environment: Environment, given: Any) -> Table:
    """Open the rows: of --input, or of the channel."""
    folder = Path(given.input) if given.input else environment.training_dir
    if folder is None:
        raise UserError(
            f"--input: not given, and the channels are {', '.join(environment.channels) or 'none'}; allowed is a "
            "folder or file, one channel, or a channel `training`"
        )
    table = Table.read(
        folder, f"--input={given.input}" if given.input else f"channel {folder.name}"
    )
    if given.rows is not None and not environment.training_is_sharded and len(table) != given.rows:
        raise UserError(
            f"--rows: found {given.rows}, but {table.channel} has {len(table)}; give it the right files"
        )
    return table


def run(
    environment: Environment,
    table: Table,
    given: Any,
    settings: Mapping[str, Any],
    make: Callable[[torch.device], Function],
) -> None:
    """Compute this host's rows, on all its devices, and write its part; `make` returns a device's function.

    `settings` and the rows decide the result. The function gets the rows' numbers and returns arrays by name; it may
    have an attribute `size`, the rows of a block that fit into its memory.
    """
    allocator.keep_freed()
    sharded = environment.training_is_sharded and not given.input
    part = range(len(table)) if sharded else _part(environment, len(table), given.weights)
    run = {"source": table.fingerprint, "settings": dict(settings)}
    about = run | {"total": None if sharded else len(table), "host": environment.current_host}
    about |= {
        "hosts": list(environment.hosts),
        "files": {name: len(rows) for name, rows in table.places.items()},
    }
    about |= {"revision": environment.revision}
    check_writable(environment.model_dir, "the result")
    check_writable(environment.checkpoint_dir, "blocks")
    blocks = Blocks(environment.checkpoint_dir, run)
    done = blocks.whole()
    for number in SIGNALS:
        signal.signal(number, partial(_leave, blocks, part))
    host = environment.current_host
    start_notice.done()
    print(
        f"{host}: rows {part.start} to {part.stop} of {len(table)}{' of its own files' * sharded}",
        flush=True,
    )
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [
        torch.device("cpu")
    ]
    threads.share(1, devices[0].type)
    with ThreadPoolExecutor(len(devices)) as pool:
        jobs = []
        for device, piece in zip(devices, partition.devices(part, len(devices)), strict=True):
            function = make(device)
            size = min(given.block_rows or 2**62, getattr(function, "size", 1024))
            say = partial(_say, host if len(devices) == 1 else f"{host} {device}")
            jobs.append(pool.submit(compute, blocks, piece, done, size, function, say))
        for job in jobs:
            job.result()
    path = parts.write(environment.model_dir, part, blocks.read(part), about)
    print(f"model: {path}", flush=True)


def _part(environment: Environment, total: int, weights: Mapping[str, float] | None) -> range:
    """Return this host's rows."""
    if not weights:
        return partition.rows(
            total, len(environment.hosts), environment.hosts.index(environment.current_host)
        )
    return partition.groups(total, environment.groups, weights)[environment.current_host]


def _say(who: str, line: str) -> None:
    print(f"{who}: {line}", flush=True)


def _leave(blocks: Blocks, part: range, number: int, frame: Any) -> None:
    """End at once: what is committed is safe, and there is nothing else to save."""
    left = sum(map(len, partition.missing(part, blocks.named())))
    line = f"{words(len(part) - left, signal.Signals(number).name)}; {left} of {len(part)} rows are left [{place()}]"
    print(line, file=sys.stderr, flush=True)
    if file := failure_file():
        with suppress(OSError):
            write(file, line)
    os._exit(status(number))


def main(args: list[str] | None = None) -> None:
    """Run a function of the user's."""
    with reported(failure_file(), place()):
        environment = Environment.read()
        made = parser(__doc__)
        made.add_argument(
            "--function", type=str, required=True, help="MODULE.FUNCTION: of a block, to an array"
        )
        made.add_argument(
            "--settings",
            type=dict[str, Any],
            default={},
            help="what the function gets by name: {...}",
        )
        given = parse(made, environment, args)
        module, _, name = given.function.rpartition(".")
        sys.path.insert(0, str(Path.cwd()))
        function, why = None, f"module {module!r} has no attribute {name!r}"
        if module and all(map(str.isidentifier, given.function.split("."))):
            try:
                function = getattr(importlib.import_module(module), name, None)
            except ImportError as error:
                why = str(error)
        if function is None:
            raise UserError(
                f"--function: found {given.function!r} ({why}); allowed is MODULE.FUNCTION of the job's source"
            )
        table = read(environment, given)
        settings = {"function": given.function} | given.settings
        run(
            environment,
            table,
            given,
            settings,
            lambda _: lambda rows: function(table[rows], **given.settings),
        )
