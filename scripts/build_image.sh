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
#   EXTRA_CA_CERTIFICATE  PEM text of certificates to trust as well, in the build and in the image
#   SAGEMAKER_PROGRAM     what `train` runs, e.g. app/train_torchrun.py
#   LIGHTNING_BOLTS       0: without Lightning Bolts
#   LOGGERS               "mlflow", "wandb" or both: the packages that these loggers need
#   COMPILER              1: a C++ compiler, for torch.compile
#
# The image's version and revision, and the address of its source, come from git.
set -euo pipefail

cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}

if ! "$docker" version >/dev/null 2>&1; then
    echo "build_image.sh: no Docker engine answers; '$docker version' says why" >&2
    exit 1
fi

arguments=(--tag "${IMAGE:-sagemaker-lightning}")
for name in BASE_IMAGE MINICONDA_URL MINICONDA_SHA256 PIP_INDEX_URL CONDA_CHANNEL_ALIAS EXTRA_CA_CERTIFICATE \
    SAGEMAKER_PROGRAM LIGHTNING_BOLTS LOGGERS COMPILER; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
arguments+=(
    --build-arg "VERSION=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)"
    --build-arg "REVISION=$(git rev-parse --verify HEAD 2>/dev/null || echo unknown)"
    --build-arg "SOURCE=$(git remote get-url origin 2>/dev/null | sed 's#//[^@/]*@#//#' || echo unknown)" # no password
)

exec "$docker" build "${arguments[@]}" "$@" .
