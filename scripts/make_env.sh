#!/bin/bash
# Makes a virtual environment with the packages of environment.yml, those of the tests, and the application.
#
#   [PYTHON=python3.12] scripts/make_env.sh DIR        Python 3.11 or later; nothing else is needed
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
directory=${1:?"usage: make_env.sh DIR"}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: PYTHON=$python is $("$python" --version); Python 3.11 or later is needed" >&2
    exit 1
}
"$python" -m venv "$directory" || {
    echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
}
pip() { "$directory/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "installing the packages of environment.yml into $directory: about 5.5 GB and two minutes, once"
packages=$(sed -n '/- pip:/,$ s/^ *- \([^ ]*==[^ ]*\).*/\1/p' "$home/environment.yml")
# The toolkit has no wheel, and a C extension (gethostname, a shim for MPI) that is not needed here: `true` for a compiler
# leaves it out, so that no compiler is asked for, and an empty module takes its place, as the toolkit imports it.
CC=true LDSHARED=true pip install --quiet --no-cache-dir --no-deps "$(grep sagemaker-training <<<"$packages")"
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo '"""In place of sagemaker-training'"'"'s C extension, which only MPI calls."""' >"$site/gethostname.py"
# shellcheck disable=SC2086
pip install --quiet $packages --requirement "$home/tests/requirements.txt"
# `app` can be imported from anywhere in this environment.
echo "$home" >"$site/sagemaker-lightning.pth"
touch "$directory/ready"
