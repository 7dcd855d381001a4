#!/bin/bash
# Runs uv, which pip installs first, by its lock.
#
#   scripts/uv.sh ARGUMENT OF uv...
#
# From the environment:
#
#   UV_INSTALLER    a python with pip, to install uv      (default: python3)
#   UV_FOLDER       where uv is, or goes                  (default: .venvs/uv)
#   TORCH           another build of torch than PyPI's: cpu, cu126, ...
#   TORCH_INDEX_URL the index that has it                 (default: PyTorch's own)
#   UV_CACHE_DIR, UV_LINK_MODE, UV_DEFAULT_INDEX, SSL_CERT_FILE, ...  uv's own
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
folder=${UV_FOLDER:-$home/.venvs/uv}
if ! cmp -s "$home/locks/uv.txt" "$folder/lock.txt"; then
    mkdir -p "$(dirname "$folder")"
    made=$(mktemp -d "$folder.XXXXXX")
    "${UV_INSTALLER:-python3}" -m pip install --quiet --disable-pip-version-check --target "$made" \
        --require-hashes --requirement "$home/locks/uv.txt" || {
        echo "error: locks/uv.txt: uv, which installs the packages, cannot be installed, see above; if a hash differs, the index" \
            "serves another file than the one that was locked: do not use it; if the index lacks uv, set PIP_INDEX_URL to one" \
            "that has it" >&2
        rm -rf "$made"
        exit 1
    }
    cp "$home/locks/uv.txt" "$made/lock.txt"
    rm -rf "$folder"
    mv "$made" "$folder"
fi

# uv does not read pip's settings: the index and the certificates of a closed network are handed on.
export UV_CACHE_DIR=${UV_CACHE_DIR:-$home/.venvs/cache} UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL-}} SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT-}}
[[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
[[ -n $SSL_CERT_FILE ]] || unset SSL_CERT_FILE
# An index may be slow, or fail for a moment: uv by itself gives up after 30 s of silence and 3 attempts.
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120} UV_HTTP_RETRIES=${UV_HTTP_RETRIES:-8}
# PyTorch's index has older copies of other packages, too. A lock's hashes, not the order of the indexes, say what is right.
[[ -z ${TORCH-} ]] ||
    export UV_INDEX=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/$TORCH} UV_INDEX_STRATEGY=unsafe-best-match
exec "$folder/bin/uv" --quiet "$@"
