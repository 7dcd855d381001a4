#!/bin/bash
# Fetches a file that a build argument of the Dockerfile names, and ends if it is not the one that was meant.
#
#   NAME_URL=... NAME_SHA256=... scripts/fetch.sh NAME FILE
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 1
}

url=$1_URL sum=$1_SHA256
[[ ${!sum-} =~ ^[0-9a-f]{64}$ ]] || fail "$sum: found '${!sum-}', expected the SHA-256 of ${!url}, 64 digits"
curl --fail --location --silent --show-error --retry 3 --output "$2" "${!url}" ||
    fail "$url: ${!url} cannot be fetched (see above); set $url to a place that has the same file"
found=$(sha256sum <"$2" | cut -d' ' -f1)
[[ $found == "${!sum}" ]] || {
    rm "$2"
    fail "$sum: found $found, expected ${!sum}: ${!url} is another file; do not run it, or set $sum to what its publisher names"
}
