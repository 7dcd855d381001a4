"""The settings of a rehearsal.

What the service leaves to chance, or decides by itself, is a flag here.
"""

import argparse
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_lightning.launcher import completion, prices
from sagemaker_lightning.launcher.prices import Price
from sagemaker_rehearsal.faults.rules import Fault
from sagemaker_rehearsal.faults.rules import parse as parse_fault
from sagemaker_rehearsal.faults.schedule import Rule, parse

PORT = 4571
INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9-]+")
ABOVE_0 = ("sync_every", "hang_after")


@dataclass(frozen=True)
class Sync:
    """How the checkpoint folder is copied to S3.

    The defaults are what users have seen the service do.
    """

    every: float
    """Seconds between two looks at the folder."""
    lag: float
    """Seconds from a file's appearance to its upload."""
    settle: float
    """Seconds without a change before a file is uploaded; 0 uploads half-written files."""
    stall_after: float | None
    """Seconds of training after which nothing is uploaded any more; None for never."""
    markers: bool
    """Whether FILE.sagemaker-uploading and FILE.sagemaker-uploaded appear beside each file."""
    markers_uploaded: bool
    """Whether these markers are uploaded to S3, too."""
    deletions: bool
    """Whether a deletion in the folder deletes in S3."""
    flush: bool
    """Whether the folder is uploaded once more when the container has ended."""


@dataclass(frozen=True)
class Settings:
    """The values of all flags; `add_flags` says what each one means."""

    port: int
    folder: Path
    allow: list[Path]
    engine: str
    interrupt: list[Rule]
    faults: list[Fault]
    hang_after: float
    seed: int
    grace: float
    repairs: int
    price: float | None
    spot_price: float | None
    fail_below: float | None
    compare: bool
    gpus: bool
    run: Path | None
    no_capacity: list[str]
    prices: dict[str, Price]
    has_own_prices: bool
    """Whether `prices` are this package's own list, for want of --prices."""
    sync: Sync


def prices_for(settings: Settings, types: Collection[str]) -> dict[str, Any]:
    """Return the prices of a job's instance hours, as the arguments of the report.

    Args:
        settings: The rehearsal's settings.
        types: The types of the job's instances. Prices of several are by type.
    """
    if settings.price is not None:
        return {"price": settings.price, "spot_price": settings.spot_price, "currency": ""}
    found = {name: settings.prices[name] for name in sorted(types) if name in settings.prices}
    if len(found) < len(types) or len({each.currency for each in found.values()}) != 1:
        return {"price": None, "spot_price": None, "currency": ""}
    price: dict[str, float] = {name: each.on_demand for name, each in found.items()}
    spot = {name: each.spot for name, each in found.items() if each.spot is not None}
    (currency,) = {each.currency for each in found.values()}
    several = len(found) > 1
    return {
        "price": price if several else price.popitem()[1],
        "spot_price": None if len(spot) < len(found) else spot if several else spot.popitem()[1],
        "currency": currency,
    }


def prices_of_job(settings: Settings, types: Collection[str], is_spot: bool) -> dict[str, Any]:
    """Return the prices of a job's instance hours; a job on demand has none on spot."""
    prices = prices_for(settings, types)
    return prices if is_spot else prices | {"spot_price": None}


def describe_prices(settings: Settings, types: Collection[str]) -> list[str]:
    """Return lines on the prices by type for a job; none where they are not used."""
    if settings.price is not None:
        return []
    if missing := sorted(set(types) - settings.prices.keys()):
        if settings.has_own_prices:
            return []
        return [f"no cost is said: --prices has no price of {', '.join(missing)}"]
    found = {name: settings.prices[name] for name in sorted(types)}
    if len({each.currency for each in found.values()}) > 1:
        listed = ", ".join(f"{name} in {each.currency}" for name, each in found.items())
        return [f"no cost is said: --prices has {listed}"]
    lines = [
        f"prices of {name}: in {each.currency}, of {each.origin}" for name, each in found.items()
    ]
    return [*lines, prices.CAUTION] if settings.has_own_prices else lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a rehearsal to a parser."""
    add = parser.add_argument
    add(
        "--port",
        type=int,
        default=PORT,
        help="of the endpoint; 0 takes a free one (default: %(default)s)",
    )
    folder_flag = add(
        "--folder",
        type=Path,
        default=Path("output/rehearsal"),
        help="gets each job's report, log and record",
    )
    allow_flag = add(
        "--allow",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="file:// channels may be in it; may be repeated (default: the working folder)",
    )
    engines = ["auto", "docker", "processes"]
    add(
        "--engine",
        choices=engines,
        default="auto",
        help="what runs the jobs; auto: Docker where an engine answers",
    )
    run_flag = add(
        "--run",
        type=Path,
        metavar="REQUEST",
        help="run one job, a CreateTrainingJob request in JSON, and leave",
    )
    for flag in (folder_flag, allow_flag, run_flag):
        flag.complete = completion.FILES
    add("--gpus", action="store_true", help="give the containers this machine's GPUs")
    add(
        "--no-capacity",
        action="append",
        default=[],
        metavar="TYPE",
        help="there are no instances of this type: InstancePreferences choose another, an "
        "on-demand job fails, a spot job waits; may be repeated",
    )
    spot = parser.add_argument_group("spot interruptions, of jobs with EnableManagedSpotTraining")
    spot.add_argument(
        "--interrupt",
        action="append",
        default=[],
        metavar="RULE",
        help="may be repeated; see below",
    )
    spot.add_argument(
        "--seed", type=int, default=0, help="of what the rules draw (default: %(default)s)"
    )
    faults = parser.add_argument_group("faults, of all jobs")
    faults.add_argument(
        "--fault", action="append", default=[], metavar="RULE", help="may be repeated; see below"
    )
    faults.add_argument(
        "--hang-after",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="without a new step after a fault, a job hangs, and is ended (default: %(default)s)",
    )
    stopping = parser.add_argument_group("stopping")
    stopping.add_argument(
        "--grace",
        type=float,
        default=SAGEMAKER_KILLS,
        help="seconds from SIGTERM to SIGKILL (default: %(default)s, as on AWS)",
    )
    stopping.add_argument(
        "--repairs",
        type=int,
        default=0,
        help=(
            "how often a job that fails on GPU instances is started again; the service does it up "
            "to 10 times, for a broken GPU (default: %(default)s)"
        ),
    )
    _add_sync_flags(parser.add_argument_group("the copy of checkpoints to S3"))
    report = parser.add_argument_group("the report")
    report.add_argument(
        "--price", type=float, help="of an instance hour on demand, in any currency"
    )
    report.add_argument("--spot-price", type=float, help="of an instance hour on spot")
    prices_flag = report.add_argument(
        "--prices",
        metavar="FILE",
        help=f"CSV or JSON with {', '.join(prices.COLUMNS)} for each type of instance, in place of "
        "--price (default: a list of the package's, whose date is noted)",
    )
    prices_flag.complete = completion.FILES
    add_fail_below(report, "of --run: ")
    report.add_argument(
        "--compare",
        action="store_true",
        help=(
            "run each job that was interrupted or had a fault once more, left alone, and compare "
            "time and bits"
        ),
    )


def add_fail_below(group: argparse._ActionsContainer, of: str = "") -> None:
    """Add the flag that makes the exit status 1 where the goodput is too low."""
    group.add_argument(
        "--fail-below",
        type=share,
        metavar="PERCENT",
        help=f"{of}exit status 1, with a line, if the goodput is lower, e.g. 90%%",
    )


def share(text: str) -> float:
    """Return a percentage such as `90%` as a share, 0 to 1; ArgumentTypeError if it is not one."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", text)
    if not match or float(match[1]) > 100:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 0% to 100%, e.g. 90%")
    return float(match[1]) / 100


def _add_sync_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--sync-every",
        type=float,
        default=1.0,
        help="seconds between two looks (default: %(default)s)",
    )
    add(
        "--sync-lag", type=float, default=0.0, help="seconds from a file's appearance to its upload"
    )
    add(
        "--sync-settle",
        type=float,
        default=0.0,
        help="seconds a file must be left alone; 0 copies half-written ones",
    )
    add(
        "--sync-stall-after",
        type=float,
        help="seconds of training after which nothing is uploaded any more",
    )
    add(
        "--sync-no-markers",
        action="store_true",
        help="no FILE.sagemaker-uploading, FILE.sagemaker-uploaded",
    )
    add(
        "--sync-markers-uploaded",
        action="store_true",
        help="the markers are uploaded, too, and restored",
    )
    add("--sync-keep-deleted", action="store_true", help="a file deleted in the folder stays in S3")
    add(
        "--sync-flush",
        action="store_true",
        help="upload once more when the container has ended; not promised by AWS",
    )


def from_flags(args: argparse.Namespace) -> Settings:
    """Return the settings; ValueError names the flag that is wrong."""
    numbers = (
        "hang_after",
        "grace",
        "repairs",
        "price",
        "spot_price",
        "sync_every",
        "sync_lag",
        "sync_settle",
        "sync_stall_after",
    )
    for name in numbers:
        value = getattr(args, name)
        if value is not None and (not 0 <= value < math.inf or (name in ABOVE_0 and value == 0)):
            smallest = "above 0" if name in ABOVE_0 else "0 or more"
            raise ValueError(f"--{name.replace('_', '-')}: found {value}, expected {smallest}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port: found {args.port}, expected 0 to 65535")
    if (args.price is None) != (args.spot_price is None):
        raise ValueError("--price, --spot-price: found one of them, expected both or none")
    if args.fail_below is not None and not args.run:
        raise ValueError(
            "--fail-below: found without --run, which it is for; of a job of a served rehearsal, "
            "the command report has it"
        )
    for name in args.no_capacity:
        if not INSTANCE_TYPE.fullmatch(name):
            raise ValueError(
                f"--no-capacity: found {name!r}, expected a type of instances, e.g. ml.g5.xlarge"
            )
    allow = args.allow or [Path.cwd()]
    for folder in allow:
        if not folder.is_dir():
            raise ValueError(f"--allow: found {folder}, expected a folder that is there")
    return Settings(
        port=args.port,
        folder=args.folder.resolve(),
        allow=[folder.resolve() for folder in allow],
        engine=args.engine,
        interrupt=[parse(text) for text in args.interrupt],
        faults=[parse_fault(text) for text in args.fault],
        hang_after=args.hang_after,
        seed=args.seed,
        grace=args.grace,
        repairs=args.repairs,
        price=args.price,
        spot_price=args.spot_price,
        fail_below=args.fail_below,
        compare=args.compare,
        gpus=args.gpus,
        run=args.run,
        no_capacity=args.no_capacity,
        prices=prices.read(args.prices or prices.OWN),
        has_own_prices=not args.prices,
        sync=Sync(
            every=args.sync_every,
            lag=args.sync_lag,
            settle=args.sync_settle,
            stall_after=args.sync_stall_after,
            markers=not args.sync_no_markers,
            markers_uploaded=args.sync_markers_uploaded,
            deletions=not args.sync_keep_deleted,
            flush=args.sync_flush,
        ),
    )
