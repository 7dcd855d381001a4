#!/bin/bash
# Ends a RUN of the Dockerfile: what the RUN has written becomes the same bytes in every build.
#
#   SOURCE_DATE_EPOCH=SECONDS scripts/finish_layer.sh [PYTHON]      PYTHON: its packages are compiled to byte code
#
# All files below the folders that builds write to get one date: what earlier layers have has it already and is not touched.
# Byte code has the date of its source in it, so the sources get theirs first; Python still sees where a source is changed.
set -euo pipefail

same_date() {
    find /opt /root /tmp -newermt "@$SOURCE_DATE_EPOCH" -print0 |
        xargs --null --no-run-if-empty touch --no-dereference --date="@$SOURCE_DATE_EPOCH"
}

# conda's list of what it did, and when; the file itself marks the folder as an environment.
find /opt -path '*/conda-meta/history' -size +0 -exec truncate --size=0 {} +
rm -rf /root/.cache
same_date
if [[ $# -gt 0 ]]; then
    # A package may have sources that are not for this Python: compileall names them and continues.
    site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1" -m compileall -q -j 0 --invalidation-mode timestamp "$site" >/tmp/compileall.log || true
    rm -f /tmp/compileall.log
    same_date
fi
