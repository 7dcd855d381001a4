"""Collects in one folder what a machine without a network lacks: wheels, and the data.

    python -m benchmarks.carry [--python 3.12] [--data FOLDER] [--folder .carry] [--mib 64]
                               [PACKAGE ...]

Writes DIR/wheels and, with --data, DIR/data. By default, the packages are those that an image with
PyTorch, Lightning and TensorBoard usually lacks, in the versions that are installed here. pip
fetches them for the other machine: built for its Python, Linux on x86-64. --mib limits what may
travel, the checkout included. On the other machine:

    python3 -m pip install --no-index --no-deps --target /tmp/site .carry/wheels/*.whl
    PYTHONPATH=/tmp/site python3 -m benchmarks.gpu --data_dir ...
"""

import argparse
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.report import ROOT

# LightningCLI's parser, with what it needs. The benchmarks do without sagemaker-training and s3fs,
# which environment.yml has, too.
LACKING = ("jsonargparse", "docstring-parser", "typeshed-client")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
MIB = 2**20


def carry(folder: Path, python: str, packages: list[str], data: Path | None, mib: float) -> float:
    """Make the folder; return the MiB that travel, the checkout included.

    SystemExit: one line says what is wrong.
    """
    if data and not data.is_dir():
        raise SystemExit(f"error: --data: found {data}, expected a folder")
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += [
        f"--python-version={python}",
        "--implementation=cp",
        *(f"--platform={name}" for name in PLATFORMS),
    ]
    completed = subprocess.run(
        [*command, f"--dest={wheels}", *packages], capture_output=True, text=True
    )
    if completed.returncode:
        errors = [line for line in completed.stderr.splitlines() if line.startswith("ERROR")] or [
            completed.stderr.strip()
        ]
        raise SystemExit(f"error: pip found no wheel for Python {python}: {errors[-1]}")
    if data:
        shutil.copytree(data, folder / "data")
    size = (_size(folder) + sum(path.stat().st_size for path in _checkout())) / MIB
    if size > mib:
        raise SystemExit(
            f"error: {folder}: {size:.1f} MiB travel with the checkout, "
            f"expected {mib:g}; carry less"
        )
    return size


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _checkout() -> list[Path]:
    """Return the files of the checkout that git does not ignore."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def main() -> None:
    """Do what the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "packages",
        nargs="*",
        metavar="PACKAGE",
        help=f"NAME==VERSION (default: {', '.join(LACKING)})",
    )
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    parser.add_argument("--data", type=Path, help="folder of the data, as it is to travel")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".carry", help="to make again (default: .carry)"
    )
    parser.add_argument(
        "--mib", type=float, default=64, help="that may travel, the checkout included (default: 64)"
    )
    args = parser.parse_args()
    packages = args.packages or [f"{name}=={metadata.version(name)}" for name in LACKING]
    size = carry(args.folder, args.python, packages, args.data, args.mib)
    print(f"{args.folder}: {size:.1f} MiB travel, the checkout included")


if __name__ == "__main__":
    main()
