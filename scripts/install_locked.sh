#!/bin/bash
# Installs lock files into a Python environment: each package by version and SHA-256, and nothing that they do not name.
#
#   scripts/install_locked.sh PYTHON install [OPTION OF uv pip install]... LOCK...
#   scripts/install_locked.sh PYTHON sync [OPTION OF uv pip sync]... LOCK...         and removes what they do not name
#
# PYTHON is the environment's. A LOCK is a file of locks/, whose name ends in .txt. uv (uv.sh) unpacks each package once, below
# .venvs, and links it into every environment that has it.
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
usage="usage: install_locked.sh PYTHON install|sync [OPTION]... LOCK..."
environment=${1:?$usage} command=${2:?$usage}
shift 2

# What has no wheel is built with what locks/build.txt has.
arguments=(--require-hashes --build-constraints "$home/locks/build.txt" --require-build-hashes)
for word in "$@"; do
    [[ $command == install && $word == *.txt ]] && arguments+=(--requirement)
    arguments+=("$word")
done
export UV_INSTALLER=${UV_INSTALLER:-$environment}
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"$home/scripts/uv.sh" pip "$command" --python "$environment" "${arguments[@]}" 2>"$output" && exit
cat "$output" >&2
said=$(tr -s '\n ' ' ' <"$output") # uv breaks its lines anywhere
if [[ $said == *"error: locks/uv.txt"* ]]; then
    exit 1 # uv.sh has said it
elif [[ $said == *"Hash mismatch"* ]]; then
    why="the index serves another file than the one that was locked, do not install it; PIP_INDEX_URL names another index"
elif [[ $said =~ "not found in the"|"no version of"|"no usable wheels"|"no wheels with" ]]; then
    why="the index lacks a package of this lock; set PIP_INDEX_URL to an index that has it, or lock other versions: make lock"
elif [[ $said == *"No space left on device"* ]]; then
    why="the disk is full, make room and try again"
else
    why="not installed as it is locked; after a change of a list of packages: make lock"
fi
echo "error: ${*: -1}: $why (see above)" >&2
exit 1
