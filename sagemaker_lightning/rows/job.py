"""A job whose hosts split the rows of a table and do not communicate.

    docker run -e SAGEMAKER_PROGRAM=app/split.py IMAGE train        with the hyperparameter
                                                                    function=mine.compute
    python app/split.py --function mine.compute --input rows.npy    without SageMaker

Each host computes its own rows, in blocks that survive a stop. The function gets a block, float32
[n, columns], and returns an array whose first dimension is n, or a dictionary of such arrays. A
function that needs all rows needs a program of its own, made of the functions here;
app/similarity.py is an example.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser

from sagemaker_lightning.cli import mistakes
from sagemaker_lightning.contract import hyperparameters
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported, write
from sagemaker_lightning.contract.log import log, say_last
from sagemaker_lightning.contract.shutdown import handled_signals, interruption_message, status
from sagemaker_lightning.process import allocator, start_notice, threads
from sagemaker_lightning.rows import partition, parts
from sagemaker_lightning.rows.blocks import Blocks, compute
from sagemaker_lightning.rows.table import Table

Function = Callable[[range], Any]


def parser(manual: str) -> ArgumentParser:
    """Return a parser with the flags that every job of this kind has."""
    flag_parser = ArgumentParser(description=manual, exit_on_error=False, allow_abbrev=False)
    flag_parser.add_argument(
        "--input",
        type=str,
        help="folder or file of the rows, .npy or .parquet (default: the channel)",
    )
    flag_parser.add_argument(
        "--rows", type=int, help="how many rows there must be, if that is known"
    )
    flag_parser.add_argument(
        "--block_rows", type=int, help="rows of a block at most (default: as the memory has it)"
    )
    flag_parser.add_argument(
        "--weights",
        type=dict[str, float],
        help="what a host of each instance group can do: {group: n}",
    )
    return flag_parser


def parse(
    flag_parser: ArgumentParser, environment: SageMakerEnvironment, args: list[str] | None
) -> Any:
    """Parse the flags; UserError says in one line which flag is wrong.

    Args:
        flag_parser: The job's parser.
        environment: The job. Its hyperparameters are parsed if `args` is None and
            the command line is the one that the toolkit made of them.
        args: The command line; None for that of the process.
    """
    if args is None and environment.user_args == tuple(sys.argv[1:]):
        args = hyperparameters.flags(environment.hyperparameters)
    try:
        flags = flag_parser.parse_args(args)
    except ArgumentError as error:
        arguments = sys.argv[1:] if args is None else args
        raise UserError(
            mistakes.explain_all(flag_parser, arguments) or mistakes.explain(error, flag_parser)
        ) from None
    for name in ("rows", "block_rows"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise UserError(f"--{name}: found {getattr(flags, name)}, expected 1 or more")
    return flags


def read(environment: SageMakerEnvironment, flags: Any) -> Table:
    """Open the table of --input, or of the training channel.

    Raises UserError if there is neither, or if the number of rows is not --rows.
    """
    folder = Path(flags.input) if flags.input else environment.training_dir
    if folder is None:
        raise UserError(
            "--input: not given, and the channels are "
            f"{', '.join(environment.channels) or 'none'}; expected a folder or file, one "
            "channel, or a channel `training`"
        )
    table = Table.read(
        folder, f"--input={flags.input}" if flags.input else f"channel {folder.name}"
    )
    if flags.rows is not None and not environment.training_is_sharded and len(table) != flags.rows:
        raise UserError(
            f"--rows: found {flags.rows}, but {table.channel} has {len(table)}; give it the right "
            "files"
        )
    return table


def run(
    environment: SageMakerEnvironment,
    table: Table,
    flags: Any,
    settings: Mapping[str, Any],
    make: Callable[[torch.device], Function],
) -> None:
    """Compute this host's rows on all its devices, and write its part.

    Args:
        environment: Hosts, folders and devices of the job.
        table: All rows that this host sees.
        flags: The flags of `parser`.
        settings: What decides the result, together with the rows.
        make: Gets a device and returns its function, from rows to arrays by name. The function may
            have an attribute `size`: the number of rows of a block that fits into its memory.
    """
    allocator.keep_freed_memory()
    sharded = environment.training_is_sharded and not flags.input
    part = range(len(table)) if sharded else _rows_of_host(environment, len(table), flags.weights)
    run = {"source": table.fingerprint, "settings": dict(settings)}
    manifest = run | {"total": None if sharded else len(table), "host": environment.current_host}
    manifest |= {
        "hosts": list(environment.hosts),
        "files": {name: len(rows) for name, rows in table.places.items()},
    }
    manifest |= {"revision": environment.revision}
    check_writable(environment.model_dir, "the result")
    check_writable(environment.checkpoint_dir, "blocks")
    blocks = Blocks(environment.checkpoint_dir, run)
    done = blocks.whole()
    home = environment.checkpoint_home(blocks.folder)
    for number in handled_signals():
        signal.signal(number, partial(_report_and_exit, blocks, home, part))
    host = environment.current_host
    start_notice.end()
    log.info(
        f"{host}: rows {part.start} to {part.stop} of {len(table)}{' of its own files' * sharded}"
    )
    if home.notice:
        log.warning(home.notice)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [
        torch.device("cpu")
    ]
    threads.divide_cpus(1, devices[0].type)
    has_failed = threading.Event()
    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            jobs = []
            for device, piece in zip(devices, partition.devices(part, len(devices)), strict=True):
                function = make(device)
                most = getattr(function, "size", 1024)
                size = min(flags.block_rows or most, most)
                say = partial(_print_progress, host if len(devices) == 1 else f"{host} {device}")
                jobs.append(
                    pool.submit(compute, blocks, piece, done, size, function, say, has_failed)
                )
            for job in as_completed(jobs):
                job.result()
        # The pool waits for the other devices, which may have hours to go.
        except BaseException:
            has_failed.set()
            raise
    path = parts.write(environment.model_dir, part, blocks.read(part), manifest)
    print(f"model: {path}", flush=True)


def _rows_of_host(
    environment: SageMakerEnvironment, total: int, weights: Mapping[str, float] | None
) -> range:
    """Return this host's rows, out of `total`, by its weight if there are weights."""
    if not weights:
        return partition.rows(
            total, len(environment.hosts), environment.hosts.index(environment.current_host)
        )
    return partition.groups(total, environment.groups, weights)[environment.current_host]


def _print_progress(worker: str, line: str) -> None:
    log.info(f"{worker}: {line}")


def _report_and_exit(
    blocks: Blocks, home: CheckpointHome, part: range, number: int, frame: Any
) -> None:
    """Report what is left and exit at once; committed blocks are safe.

    Only what outlives this container counts as done.
    """
    committed = blocks.named()
    kept = [] if home.lost else committed
    if home.has_marks():
        kept = [rows for rows in committed if home.is_in_s3(blocks.path(rows))]
    missing_rows = sum(map(len, partition.missing(part, kept)))
    only_here = missing_rows - sum(map(len, partition.missing(part, committed)))
    what = f"{missing_rows} of {len(part)} rows are left"
    if home.lost:
        what += f": {home.lost}"
    elif only_here:
        what += f": {only_here} of them are done, and not known to be in S3"
    name = signal.Signals(number).name
    line = (
        f"{interruption_message(len(part) - missing_rows, f'{name}; {what}')} [{host_and_rank()}]"
    )
    say_last(line)
    if file := failure_file():
        with suppress(OSError):
            write(file, line)
    os._exit(status(number))


def main(args: list[str] | None = None) -> None:
    """Run a function of the user's, named by --function."""
    with reported(failure_file(), host_and_rank()):
        environment = SageMakerEnvironment.read()
        flag_parser = parser(__doc__)
        flag_parser.add_argument(
            "--function", type=str, required=True, help="MODULE.FUNCTION: of a block, to an array"
        )
        flag_parser.add_argument(
            "--settings",
            type=dict[str, Any],
            default={},
            help="what the function gets by name: {...}",
        )
        flags = parse(flag_parser, environment, args)
        module, _, name = flags.function.rpartition(".")
        sys.path.insert(0, str(Path.cwd()))
        function = None
        reason = f"module {module!r} has no attribute {name!r}"
        if module and all(map(str.isidentifier, flags.function.split("."))):
            try:
                function = getattr(importlib.import_module(module), name, None)
            except ImportError as error:
                reason = str(error)
        if function is None:
            raise UserError(
                f"--function: found {flags.function!r} ({reason}); expected MODULE.FUNCTION of "
                "the job's source"
            )
        table = read(environment, flags)
        # A parameter of the function may be called "function", but none is called "--function".
        settings = flags.settings | {"--function": flags.function}
        run(
            environment,
            table,
            flags,
            settings,
            lambda _: lambda rows: function(table[rows], **flags.settings),
        )
