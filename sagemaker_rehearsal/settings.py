"""The settings of a rehearsal.

What the service leaves to chance, or decides by itself, is a flag here.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_rehearsal.jobs.schedule import Rule, parse

PORT = 4571


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
    seed: int
    grace: float
    repairs: int
    price: float | None
    spot_price: float | None
    gpus: bool
    run: Path | None
    sync: Sync


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a rehearsal to a parser."""
    add = parser.add_argument
    add(
        "--port",
        type=int,
        default=PORT,
        help="of the endpoint; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--folder",
        type=Path,
        default=Path("output/rehearsal"),
        help="gets each job's report, log and record",
    )
    add(
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
    add(
        "--run",
        type=Path,
        metavar="REQUEST",
        help="run one job, a CreateTrainingJob request in JSON, and leave",
    )
    add("--gpus", action="store_true", help="give the containers this machine's GPUs")
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
        if value is not None and (
            not 0 <= value < math.inf or (name == "sync_every" and value == 0)
        ):
            smallest = "above 0" if name == "sync_every" else "0 or more"
            raise ValueError(f"--{name.replace('_', '-')}: found {value}, expected {smallest}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port: found {args.port}, expected 0 to 65535")
    if (args.price is None) != (args.spot_price is None):
        raise ValueError("--price, --spot-price: found one of them, expected both or none")
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
        seed=args.seed,
        grace=args.grace,
        repairs=args.repairs,
        price=args.price,
        spot_price=args.spot_price,
        gpus=args.gpus,
        run=args.run,
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
