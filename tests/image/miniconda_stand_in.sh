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
#   conda env create -f FILE     a venv in PREFIX/envs/<name>, with files in the place of cuda-compat's libraries; FILE has
#                                no `pip:` list
#   conda clean -afy             nothing to do
#   conda --version
#
# Different from the real thing: python comes from the system, not from conda-forge, and no solver runs. FILE is read
# strictly: what this script does not understand, the channel `defaults` among it, is an error.
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
import re
import subprocess
import sys
from pathlib import Path

KNOWN_WITHOUT_CONDA = {"pip", "cuda-compat=13.2"}  # every venv has the first; of the second, its names are enough


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


def create(file: Path) -> None:
    """`conda env create -f file`."""
    name, channels, packages = read_environment(file)
    if not name or channels != ["conda-forge", "nodefaults"]:
        sys.exit(f"conda (stand-in): {file}: needs a name, and conda-forge and nodefaults for channels: {channels}")
    here = f"python={sys.version_info.major}.{sys.version_info.minor}"
    if missing := set(packages) - KNOWN_WITHOUT_CONDA - {here}:
        sys.exit(f"conda (stand-in): {file}: only {here} and pip can be had here, not {sorted(missing)}")
    prefix = Path(sys.prefix, "envs", name)
    if prefix.exists():
        sys.exit(f"conda (stand-in): prefix already exists: {prefix}")
    subprocess.run(["/usr/bin/python3", "-m", "venv", prefix], check=True)
    libraries = prefix / "cuda-compat"
    libraries.mkdir()
    (libraries / "libcuda.so.595.45.04").touch()
    (libraries / "libcuda.so.1").symlink_to("libcuda.so.595.45.04")


match sys.argv[1:]:
    case ["--version"]:
        print("conda 0 (stand-in)")
    case ["env", "create", "-f", file]:
        create(Path(file))
    case ["clean", "-afy"]:
        pass
    case arguments:
        sys.exit(f"conda (stand-in): not a call that the Dockerfile makes: {arguments}")
EOF
} >"$prefix/bin/conda"
chmod +x "$prefix/bin/conda"
