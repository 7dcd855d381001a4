#!/bin/bash
# Makes the image's conda environment, without the packages that uv installs into it. The Dockerfile runs it.
#
#   PYTHON_VERSION=3.11 [TORCH=cpu|cu126|...] scripts/make_conda_environment.sh
#
# Where `make lock-conda` has written locks/conda-PYTHON_VERSION[-TORCH].txt, conda installs those very files, each with its
# SHA-256. Else it chooses them, by the list in environment.yml.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 1
}

home=$(dirname "$(dirname "$(readlink -f "$0")")")
name=sagemaker-lightning
[[ $PYTHON_VERSION =~ ^3\.1[123]$ ]] || fail "PYTHON_VERSION: found '$PYTHON_VERSION', expected 3.11, 3.12 and 3.13"
[[ $TORCH =~ ^(cpu|cu[0-9]{3}|)$ ]] ||
    fail "TORCH: found '$TORCH', expected cpu, and cu126 or another CUDA that PyTorch builds for; empty for PyPI's build"

lock=conda-$PYTHON_VERSION${TORCH:+-$TORCH}.txt
list=$(mktemp)
if [[ -e $home/$lock ]]; then
    # The lock has full addresses: those of a mirror, where one is set.
    sed "s#^https://conda.anaconda.org/#${CONDA_CHANNEL_ALIAS%/}/#" "$home/$lock" >"$list"
    conda create --yes --name $name --file "$list" || fail "locks/$lock: conda cannot install it (see above); if a \
checksum differs, the channel serves another file than the one that was locked: do not use it"
else
    cuda=${TORCH#cu}
    sed -e '/- pip:/,$d' -e "s/python=[0-9.]*/python=$PYTHON_VERSION/" "$home/environment.yml" >"$list"
    [[ $TORCH != cpu ]] || sed -i '/cuda-compat=/d' "$list"
    [[ $TORCH != cu* ]] || sed -i "s/cuda-compat=[0-9.]*/cuda-compat=${cuda%?}.${cuda: -1}/" "$list"
    conda env create --file "$list" || fail "environment.yml: conda cannot make the environment, see above; without a way to \
conda's host, set CONDA_CHANNEL_ALIAS to a mirror"
fi
conda clean -afy
rm "$list"

# The locks have a pip of their own. If uv replaced this one in a later layer, it would be in the image twice.
python=/opt/conda/envs/$name/bin/python
$python -m pip list --format=freeze --disable-pip-version-check | cut -d= -f1 |
    xargs --no-run-if-empty $python -m pip uninstall --yes --quiet --root-user-action=ignore
