#!/usr/bin/env bash
# A stand-in for the Miniconda installer, for tests and CI on machines that reach no conda host. Never ship an image
# that is built with it.
#
#   bash miniconda_stand_in.sh -b -p PREFIX     as the real installer is called by the Dockerfile
#
# It takes the installer's place through the Dockerfile's own build arguments (tests/image/base.sh prints them), so the
# Dockerfile under test is the real one. PREFIX becomes a venv of the system's python3 with a bin/conda that knows
# exactly the calls that the Dockerfile makes and fails on any other:
#
#   conda env create --file FILE              a venv in PREFIX/envs/NAME, with files in the place of cuda-compat's libraries;
#                                             FILE has no `pip:` list
#   conda create --yes --name NAME --file F   the same, by an explicit lock: addresses of packages, each with a SHA-256
#   conda list --name NAME --explicit --sha256    such a lock, of made-up files
#   conda clean -afy             nothing to do
#   conda --version
#
# Different from the real thing: python comes from the system, as python3.N, not from conda-forge, and no solver runs. FILE
# is read strictly: what this script does not understand, the channel `defaults` among it, is an error.
set -euo pipefail

if [ $# -ne 3 ] || [ "$1 $2" != "-b -p" ]; then
    echo "usage: $0 -b -p PREFIX" >&2
    exit 2
fi
prefix=$3
[ ! -e "$prefix" ] || { echo "$0: $prefix exists already" >&2; exit 1; }

python3 -m venv "$prefix"
{
    echo "#!$prefix/bin/python"
    cat <<'EOF'
"""The stand-in's conda: see miniconda_stand_in.sh."""
import hashlib
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

def read_environment(file: Path) -> tuple[str, list[str], list[str]]:
    """`file`'s name, channels and conda packages; an error for any line of another shape."""
    name, items, section = "", {"channels": [], "dependencies": []}, ""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line:
            continue
        if match := re.fullmatch(r"name: (\S+)", line):
            name = match[1]
        elif match := re.fullmatch(r"(channels|dependencies):", line):
            section = match[1]
        elif section and (match := re.fullmatch(r"  - (\S+)", line)):
            items[section].append(match[1])
        else:
            sys.exit(f"conda (stand-in): {file}:{number}: not understood: {line!r}")
    return name, items["channels"], items["dependencies"]


def read_lock(file: Path) -> list[str]:
    """The packages of an explicit lock; an error for one without a SHA-256."""
    lines = [line for line in file.read_text().splitlines() if line and line[0] not in "#@"]
    packages = []
    for line in lines:
        if not (match := re.fullmatch(r"https?://\S+/([a-z-]+)-([\d.]+)-\w+\.conda#[0-9a-f]{64}", line)):
            sys.exit(f"conda (stand-in): {file}: not the address of a package with its SHA-256: {line!r}")
        packages.append(f"{match[1]}={match[2]}")
    return packages


def create(name: str, packages: list[str]) -> None:
    """A venv in the place of the environment `name`."""
    found = dict(package.partition("=")[::2] for package in packages)
    if unknown := found.keys() - {"python", "pip", "cuda-compat"}:
        sys.exit(f"conda (stand-in): only python, pip and cuda-compat can be had here, not {sorted(unknown)}")
    version = ".".join(found["python"].split(".")[:2])
    if not (python := shutil.which(f"python{version}")):
        sys.exit(f"conda (stand-in): the system has no python{version}")
    prefix = Path(sys.prefix, "envs", name)
    if prefix.exists():
        sys.exit(f"conda (stand-in): prefix already exists: {prefix}")
    subprocess.run([python, "-m", "venv", prefix], check=True)
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta/history").write_text(f"==> {datetime.now()} <==\n")  # as conda's own: it has the time
    if "cuda-compat" in found:
        libraries = prefix / "cuda-compat"
        libraries.mkdir()
        (libraries / "libcuda.so.595.45.04").touch()
        (libraries / "libcuda.so.1").symlink_to("libcuda.so.595.45.04")
    (prefix / "conda-meta/packages").write_text("\n".join(packages))


def create_from_list(file: Path) -> None:
    """`conda env create --file file`."""
    name, channels, packages = read_environment(file)
    if not name or channels != ["conda-forge", "nodefaults"]:
        sys.exit(f"conda (stand-in): {file}: needs a name, and conda-forge and nodefaults for channels: {channels}")
    create(name, packages)


def show(name: str) -> None:
    """`conda list --name name --explicit --sha256`."""
    print("# platform: linux-64\n@EXPLICIT")
    for package in Path(sys.prefix, "envs", name, "conda-meta/packages").read_text().split():
        words = package.partition("=")
        file = f"{words[0]}-{words[2] or 1}-h0_0.conda"
        print(f"https://conda.anaconda.org/conda-forge/linux-64/{file}#{hashlib.sha256(file.encode()).hexdigest()}")


match sys.argv[1:]:
    case ["--version"]:
        print("conda 0 (stand-in)")
    case ["env", "create", "--file", file]:
        create_from_list(Path(file))
    case ["create", "--yes", "--name", name, "--file", file]:
        create(name, read_lock(Path(file)))
    case ["list", "--name", name, "--explicit", "--sha256"]:
        show(name)
    case ["clean", "-afy"]:
        pass
    case arguments:
        sys.exit(f"conda (stand-in): not a call that the Dockerfile makes: {arguments}")
EOF
} >"$prefix/bin/conda"
chmod +x "$prefix/bin/conda"
