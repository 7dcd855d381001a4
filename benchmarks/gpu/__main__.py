"""Measures everything on one GPU, and prints the table of the file that it writes.

    python -m benchmarks.gpu [--out DIR] [--data_dir CIFAR10] [--parts resume,step]
                             [--limit SECONDS]
    python -m benchmarks.gpu --miniature --out DIR      a rehearsal on a CPU, a minute: no figures
    python -m benchmarks.gpu report [FILE] [--write]    the table; --write: into results/gpu.md

The most valuable parts come first; each has a limit of its own. Every value is in DIR/gpu-DATE.json
as soon as it is measured. A call that finds the file of an earlier one (same GPU, versions and
commit) does what is missing in it. The exit status is 0 if all parts that were asked for are
complete.
"""

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

try:
    from benchmarks import report as machines
    from benchmarks.gpu import machine, report, runner
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.parts import CALL_SECONDS, PARTS, Options
    from benchmarks.gpu.results import Results
    from sagemaker_lightning.contract.atomic_files import check_writable
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: the package {error.name} is missing here; install environment.yml's, "
        "or see benchmarks/carry.py for a machine without a network"
    ) from None

SLOWER = 10  # times as long may a part take in miniature: on a CPU, beside other work


def main(arguments: list[str] | None = None) -> int:
    """Run what the flags ask for; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["report"]:
        return _report(arguments[1:])
    args = _parser().parse_args(arguments)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        return _error(f"--parts: found {unknown[0]}, expected {', '.join(PARTS)}")
    if args.data_dir and not args.data_dir.is_dir():
        return _error(
            f"--data_dir: found {args.data_dir}, expected a folder with CIFAR-10's python version"
        )
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        try:
            this_machine = runner.call(
                partial(Machine.read, Path(folder)), 120, Path(folder, "log")
            )
        except (RuntimeError, runner.Overrun) as error:
            return _error(
                f"GPU: asking for it failed ({error or 'no answer in 120 s'}); "
                "look at it by nvidia-smi"
            )
        if obstacle := this_machine.obstacle(args.miniature):
            return _error(obstacle)
        log = args.out.resolve() / f"gpu-{_date()}.log"
        try:
            check_writable(args.out, "results")
        except ValueError as error:
            return _error(f"--out: {error}")
        about = this_machine.about | {
            "versions": machine.versions(),
            "commit": args.commit,
            "miniature": args.miniature,
        }
        try:
            results = Results.opened(args.out.resolve(), about | {"date": _date()}, _date())
        except ValueError as error:
            return _error(str(error))
        data_dir = args.data_dir.resolve() if args.data_dir else None
        options = Options(results, Path(folder), data_dir, args.miniature)
        return _measure(args.parts, options, args.limit, log)


def _measure(names: list[str], options: Options, limit: float, log: Path) -> int:
    """Measure the parts, and print the table."""
    results = options.results
    deadline = time.monotonic() + limit
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    for name in [name for name in PARTS if name in names]:
        part = PARTS[name]
        if results.parts.get(name, {}).get("status") == "complete":
            print(f"{name}: complete already", flush=True)
            continue
        seconds_left = deadline - time.monotonic()
        if part.needs_data and not options.data_dir:
            results.part(name)["line"] = "it needs CIFAR-10: give --data_dir"
        elif seconds_left <= 0:
            results.part(name)["line"] = f"not begun: the {limit:.0f} s of the call were over"
        else:
            seconds = min(seconds_left, part.seconds * (SLOWER if options.miniature else 1))
            for line in runner.run(name, part.tasks(options), results, seconds, log):
                print(line, flush=True)
            continue
        results.write()
        print(f"{name}: {results.part(name)['line']}", flush=True)
    print(f"\n{report.text(results)}\nresults: {results.path}\nlog: {log}")
    return 0 if all(results.parts[name]["status"] == "complete" for name in names) else 1


def _report(arguments: list[str]) -> int:
    """Print the table of a file, or put it into the docs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu report")
    parser.add_argument("file", type=Path, nargs="?", help="default: the newest in results/")
    parser.add_argument("--write", action="store_true", help="put it into results/gpu.md")
    args = parser.parse_args(arguments)
    try:
        results = Results.read(args.file) if args.file else report.newest()
    except ValueError as error:
        return _error(str(error))
    if args.write:
        report.PAGE.write_text(report.written(report.PAGE.read_text(), results))
    print(report.text(results) if results else report.NOTHING)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=report.FOLDER, help="folder of the results (default: results)"
    )
    parser.add_argument(
        "--data_dir", type=Path, help="folder with CIFAR-10's python version, for the recipes"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help=f"of {','.join(PARTS)}",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=CALL_SECONDS,
        help="seconds of this call (default: %(default)s)",
    )
    parser.add_argument(
        "--commit", default=machines.commit(), help="of the code, where there is no git to ask"
    )
    parser.add_argument(
        "--miniature", action="store_true", help="a rehearsal: all is tiny, and on a CPU"
    )
    return parser


def _date() -> str:
    return datetime.date.today().isoformat()


def _error(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    # torch then asks the driver's library (NVML) whether there is a GPU: this process can still be
    # forked afterwards.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    raise SystemExit(main())
