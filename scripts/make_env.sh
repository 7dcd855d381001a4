#!/bin/bash
# Makes a virtual environment with the packages of environment.yml, those of the tests, and the application: all as locked.
#
#   [PYTHON=python3.12] scripts/make_env.sh DIR [PACKAGE==VERSION ...]
#
# Python 3.11 or later; nothing else is needed. PACKAGEs, which no lock has, are then installed in place of locked versions;
# lightning==VERSION in place of pytorch-lightning.
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
directory=${1:?"usage: make_env.sh DIR [PACKAGE==VERSION ...]"}
shift
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: PYTHON=$python is $("$python" --version); Python 3.11 or later is needed" >&2
    exit 1
}
"$python" -m venv "$directory" || {
    echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
}
echo "installing the packages of environment.yml into $directory: about 5.5 GB and a minute or two, once"
locked() { "$home/scripts/install_locked.sh" "$directory/bin/python" "$@"; }

# The toolkit has no wheel, and a C extension (gethostname, a shim for MPI) that is not needed here: `true` for a compiler
# leaves it out, so that no compiler is asked for, and an empty module takes its place, as the toolkit imports it.
CC=true LDSHARED=true locked install --no-cache --no-deps "$home/locks/toolkit.txt"
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$site"/gethostname*.so
echo '"""In place of sagemaker-training'"'"'s C extension, which only MPI calls."""' >"$site/gethostname.py"
locked sync "$home/locks/tests.txt" "$home/locks/bolts.txt"
"$home/scripts/install_bolts.sh" "$directory/bin/python"
uv() { "$home/scripts/uv.sh" pip "$1" --python "$directory/bin/python" "${@:2}"; }
if [[ $* == lightning==* ]]; then # alone: it asks for pytorch-lightning besides
    uv install --no-deps "$@"
    uv uninstall pytorch-lightning
elif [[ $# -gt 0 ]]; then
    uv install "$@"
fi
# `sagemaker_lightning` and `app` can be imported from anywhere in this environment. The second line is run whenever its
# python starts: `import lightning` works in a script that knows nothing of ours (sagemaker_lightning/compat/namespaces.py).
printf '%s
' "$home" "import sagemaker_lightning" >"$site/sagemaker-lightning.pth"
touch "$directory/ready"
