#!/bin/bash
# Adds Lightning Bolts, as it is locked, to the Python environment of PYTHON.
#
#   scripts/install_bolts.sh PYTHON
#
# Bolts is no longer maintained: 0.7.0, its last release, asks for pytorch-lightning < 2 and imports a module that version 2
# has moved. So it goes in without its dependencies, and bolts_old_import.py serves the module by its old name.
set -euo pipefail

scripts=$(dirname "$(readlink -f "$0")")
python=${1:?usage: install_bolts.sh PYTHON}
"$scripts/install_locked.sh" "$python" install --no-deps "$scripts/../locks/bolts.txt"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp --remove-destination "$scripts/bolts_old_import.py" "$site/"
echo 'import bolts_old_import' >"$site/bolts_old_import.pth"
