#!/usr/bin/env bash
# install_bolts.sh - add Lightning Bolts to the Python environment whose `python` comes first on PATH.
#
#   scripts/install_bolts.sh VERSION [TARGET]     e.g. 0.7.0; TARGET: a folder for `pip install --target`
#
# Bolts is no longer maintained: 0.7.0, its last release, asks for pytorch-lightning < 2 and imports a module that
# version 2 moved to lightning_utilities. So it goes in without its dependencies, and the module's old name is put back.
set -euo pipefail

version=${1:?usage: install_bolts.sh VERSION [TARGET]}
python -m pip install --no-deps ${2:+--target "$2"} "lightning-bolts==$version"

lightning=$(python -c 'import importlib.util as u; print(*u.find_spec("pytorch_lightning").submodule_search_locations)')
echo 'from lightning_utilities.core.apply_func import *  # noqa: F403  for Lightning Bolts' \
    >"$lightning/utilities/apply_func.py"
