#!/usr/bin/env bash
# build_image.sh - build the container image. `make build` runs it.
#
#   scripts/build_image.sh [ARGUMENT OF docker build]...      e.g. --no-cache, --pull, --progress=plain
#
# From the environment:
#
#   IMAGE                 the tag                                            (default: sagemaker-lightning)
#   DOCKER                the docker client                                  (default: docker)
#   DOCKER_BUILDKIT       1 or 0, the builder: docker's own variable
#
# and, if set and not empty, handed on to the Dockerfile, which has the defaults:
#
#   BASE_IMAGE            the system underneath: Debian or Ubuntu, pinned by digest
#   MINICONDA_URL         the Miniconda installer, http(s):// or a file:// of the base image
#   MINICONDA_SHA256      its checksum
#   PIP_INDEX_URL         a package index in PyPI's place; no password in it, the image's history shows it
#   CONDA_CHANNEL_ALIAS   a server of conda channels in Anaconda's place
#   PYTHON_VERSION        3.11, 3.12 or 3.13
#   TORCH                 cpu, cu126, ...: another build of torch, which `make lock TORCH=...` has locked
#   TORCH_INDEX_URL       the index that has it, in the place of PyTorch's
#   EXTRA_CA_CERTIFICATE  PEM text of certificates to trust as well, in the build and in the image
#   SAGEMAKER_PROGRAM     what `train` runs, e.g. app/train_torchrun.py
#   LIGHTNING_BOLTS       0: without Lightning Bolts
#   LOGGERS               "mlflow", "wandb" or both: the packages that these loggers need
#   COMPILER              1: a C++ compiler, for torch.compile
#   EFA                   1: libfabric and aws-ofi-nccl, for several nodes of AWS's large GPU instances
#   EFA_URL, EFA_SHA256   AWS's EFA installer that installs them, and its checksum
#   SOURCE_DATE_EPOCH     the date of the files in the layers, in seconds since 1970
#
# The image's version and revision, and the address of its source, come from git. An earlier image of the same tag is removed
# if it has no other tag and no container.
set -euo pipefail

cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}

if ! "$docker" version >/dev/null 2>&1; then
    echo "build_image.sh: no Docker engine answers; '$docker version' says why" >&2
    exit 1
fi

for name in PIP_INDEX_URL CONDA_CHANNEL_ALIAS TORCH_INDEX_URL MINICONDA_URL EFA_URL; do
    if [[ ${!name:-} =~ ://[^/]*@ ]]; then
        echo "error: $name: found a user or a password in the address, which the image's history would show; give the address" \
            "without it, of a server that needs none" >&2
        exit 1
    fi
done
if [ -n "${TORCH:-}" ] && [ ! -e "locks/image-$TORCH.txt" ]; then
    echo "error: TORCH: found '$TORCH', but there is no locks/image-$TORCH.txt; make lock TORCH=$TORCH writes it, where PyTorch's" \
        "index can be reached" >&2
    exit 1
fi
if [ "${TORCH:-}" = cpu ] && [ -n "${COMPILER:-}" ]; then
    echo "error: COMPILER: found '$COMPILER' with TORCH=cpu, which leaves out the headers that torch.compile takes; set one of both" >&2
    exit 1
fi

image=${IMAGE:-sagemaker-lightning}
arguments=(--tag "$image")
for name in BASE_IMAGE MINICONDA_URL MINICONDA_SHA256 PIP_INDEX_URL CONDA_CHANNEL_ALIAS EXTRA_CA_CERTIFICATE \
    SAGEMAKER_PROGRAM LIGHTNING_BOLTS LOGGERS COMPILER PYTHON_VERSION TORCH TORCH_INDEX_URL EFA EFA_URL EFA_SHA256 SOURCE_DATE_EPOCH; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
arguments+=(
    --build-arg "VERSION=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)"
    --build-arg "REVISION=$(git rev-parse --verify HEAD 2>/dev/null || echo unknown)"
    --build-arg "SOURCE=$(git remote get-url origin 2>/dev/null | sed 's#//[^@/]*@#//#' || echo unknown)" # no password
)

earlier=$("$docker" image inspect --format '{{.Id}}' "$image" 2>/dev/null || true)
"$docker" build "${arguments[@]}" "$@" .

# The image that had the tag until now would stay as <none>, with gigabytes, unless it has another name. Docker keeps what a
# container uses; the builder's cache stays.
names=$("$docker" image inspect --format '{{len .RepoTags}} {{len .RepoDigests}}' "$earlier" 2>/dev/null || true)
[[ $names != "0 0" ]] || "$docker" image rm --no-prune "$earlier" >/dev/null 2>&1 || true
