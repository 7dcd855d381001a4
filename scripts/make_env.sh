#!/bin/bash
# Makes a virtual environment with the packages of environment.yml, those of the tests, and the application.
#
#   [PYTHON=python3.12] scripts/make_env.sh DIR [PACKAGE==VERSION ...]
#
# Python 3.11 or later; nothing else is needed. PACKAGEs are installed in place of the versions that environment.yml names;
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
packages=$(sed -n '/- pip:/,$ s/^ *- \([^ ]*==[^ ]*\).*/\1/p' "$home/environment.yml")
# uv unpacks each package once, below .venvs, and links it into this environment and those of the tests. It does not read
# pip's settings: the index and the certificates of a closed network are handed on.
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep -o '^uv==[^ ]*' "$home/tests/requirements.txt")"
export UV_CACHE_DIR=$home/.venvs/cache UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL-}} SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT-}}
[[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
[[ -n $SSL_CERT_FILE ]] || unset SSL_CERT_FILE
uv() { "$directory/bin/python" -m uv --quiet pip install --python "$directory/bin/python" "$@"; }

# The toolkit has no wheel, and a C extension (gethostname, a shim for MPI) that is not needed here: `true` for a compiler
# leaves it out, so that no compiler is asked for, and an empty module takes its place, as the toolkit imports it.
CC=true LDSHARED=true uv --no-cache --no-deps "$(grep sagemaker-training <<<"$packages")"
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$site"/gethostname*.so
echo '"""In place of sagemaker-training'"'"'s C extension, which only MPI calls."""' >"$site/gethostname.py"
# shellcheck disable=SC2086
uv $packages --requirements "$home/tests/requirements.txt"
if [[ $* == lightning==* ]]; then # alone: it asks for pytorch-lightning besides
    uv --no-deps "$@"
    "$directory/bin/python" -m uv --quiet pip uninstall --python "$directory/bin/python" pytorch-lightning
elif [[ $# -gt 0 ]]; then
    uv "$@"
fi
# `sagemaker_lightning` and `app` can be imported from anywhere in this environment. The second line is run whenever its
# python starts: `import lightning` works in a script that knows nothing of ours (sagemaker_lightning/compat/namespaces.py).
printf '%s\n' "$home" "import sagemaker_lightning" >"$site/sagemaker-lightning.pth"
touch "$directory/ready"
