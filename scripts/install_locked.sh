#!/bin/bash
# Installs lock files into a Python environment: each package by version and SHA-256, and nothing that they do not name.
#
#   scripts/install_locked.sh PYTHON install [OPTION OF uv pip install]... LOCK...
#   scripts/install_locked.sh PYTHON sync [OPTION OF uv pip sync]... LOCK...         and removes what they do not name
#
# PYTHON is the environment's. A LOCK is a file of locks/, whose name ends in .txt.
#
# uv unpacks each package once, below .venvs, and links it into every environment that has it. uv itself is installed first,
# by pip and its own lock. From the environment:
#
#   UV_INSTALLER    a python with pip, to install uv                  (default: that of the environment)
#   UV_FOLDER       where uv is, or goes                              (default: .venvs/uv)
#   UV_CACHE_DIR, UV_LINK_MODE, UV_DEFAULT_INDEX, SSL_CERT_FILE, ...  uv's own
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
environment=${1:?"usage: install_locked.sh PYTHON install|sync [OPTION]... LOCK..."}
command=$2
shift 2
folder=${UV_FOLDER:-$home/.venvs/uv}
if ! cmp -s "$home/locks/uv.txt" "$folder/lock.txt"; then
    mkdir -p "$(dirname "$folder")"
    made=$(mktemp -d "$folder.XXXXXX")
    "${UV_INSTALLER:-$environment}" -m pip install --quiet --disable-pip-version-check --target "$made" \
        --require-hashes --requirement "$home/locks/uv.txt"
    cp "$home/locks/uv.txt" "$made/lock.txt"
    rm -rf "$folder"
    mv "$made" "$folder"
fi

# uv does not read pip's settings: the index and the certificates of a closed network are handed on.
export UV_CACHE_DIR=${UV_CACHE_DIR:-$home/.venvs/cache} UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL-}} SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT-}}
[[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
[[ -n $SSL_CERT_FILE ]] || unset SSL_CERT_FILE
# What has no wheel is built with what locks/build.txt has.
arguments=(--require-hashes --build-constraints "$home/locks/build.txt" --require-build-hashes)
for word in "$@"; do
    [[ $command == install && $word == *.txt ]] && arguments+=(--requirement)
    arguments+=("$word")
done
"$folder/bin/uv" --quiet pip "$command" --python "$environment" "${arguments[@]}" || {
    echo "error: ${*: -1}: not installed as it is locked, see above; after a change of a list of packages: make lock; with a" \
        "hash that differs: the index serves another file than the one that was locked, do not install it" >&2
    exit 1
}
