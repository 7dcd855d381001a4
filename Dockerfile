# A container that trains a PyTorch Lightning application on SageMaker. scripts/build_image.sh builds it and explains ARGs.
# Layers come in the order in which they change: system, conda, packages, code, version.
# Plain instructions only (no heredocs, no --mount, no syntax line): BuildKit and the legacy builder both build it.

# No CUDA base image: the CUDA libraries come with the torch wheel, the driver comes from the host.
ARG BASE_IMAGE=ubuntu:24.04@sha256:008173c23f95b170204355c12626cb5a965d779a7e1283b09e9cffbb1bf33ca3


# ---- base: the system and Miniconda ---------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# ca-certificates: trust, for everything that speaks https, here and in a job.  curl: fetches Miniconda.
# No tini: AWS warns against it in training images.  No openssh: nothing here uses MPI.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates curl \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

# For closed networks: PEM text of the certificates to trust besides. The system's store wants one file for each.
ARG EXTRA_CA_CERTIFICATE=
RUN if [ -n "$EXTRA_CA_CERTIFICATE" ]; then \
        echo "$EXTRA_CA_CERTIFICATE" \
      | awk '/BEGIN CERTIFICATE/ { n++ } n { print > ("/usr/local/share/ca-certificates/extra-" n ".crt") }' \
     && update-ca-certificates; \
    fi

# One trust store, the system's: python, pip, conda and boto3 would each bring their own.
ENV LANG=C.UTF-8 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt

# Miniconda is checked before it runs. conda-forge replaces its `defaults` channel, which has other terms of use.
ARG MINICONDA_URL=https://repo.anaconda.com/miniconda/Miniconda3-py311_24.11.1-0-Linux-x86_64.sh
ARG MINICONDA_SHA256=807774bae6cd87132094458217ebf713df436f64779faf9bb4c3d4b6615c1e3a
RUN curl -fsSL --retry 3 -o /tmp/miniconda.sh "$MINICONDA_URL" \
 && echo "$MINICONDA_SHA256  /tmp/miniconda.sh" | sha256sum -c - \
 && bash /tmp/miniconda.sh -b -p /opt/conda \
 && rm /tmp/miniconda.sh \
 && echo 'channels: [conda-forge]' >/opt/conda/.condarc \
 && /opt/conda/bin/conda clean -afy


# ---- wheels: what has to be compiled, so that no compiler gets into the image ---------------------------------------

FROM base AS wheels

# sagemaker-training comes as source only and has a small C extension. python's own headers are Miniconda's.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev

# Built with the setuptools that is locked. pip reads PIP_INDEX_URL itself and takes empty as its default. No password in it:
# `docker history` shows it.
ARG PIP_INDEX_URL=
COPY locks/build.txt locks/toolkit.txt /tmp/
RUN /opt/conda/bin/python -m venv /tmp/build \
 && /tmp/build/bin/python -m pip install --require-hashes -r /tmp/build.txt \
 && /tmp/build/bin/python -m pip wheel --require-hashes --no-build-isolation --no-deps --wheel-dir /wheels -r /tmp/toolkit.txt


# ---- the image ------------------------------------------------------------------------------------------------------

FROM base

# Outside of /opt/ml, which is SageMaker's: it mounts over it.
WORKDIR /opt/sagemaker-lightning

# Found by a shell that nothing has activated: SageMaker's SDK 3 goes round ENTRYPOINT and asks for bash, python, pip.
ENV PATH=/opt/conda/envs/sagemaker-lightning/bin:/opt/conda/bin:$PATH

# The environment, in one layer with its cleaning. conda makes it (its `python`, `pip` and cuda-compat), and uv installs what
# environment.yml has under `pip:` as locked, by version and SHA-256. Both read their arguments under the arguments' names.
# Removed is what nothing here can use: static libraries (no linker), tests, the multi-GPU cuSOLVER (torch does not link
# it), NVSHMEM's device bitcode (it takes a compiler), Triton's AMD code generator and its profiler's copies of CUPTI.
ARG CONDA_CHANNEL_ALIAS=https://conda.anaconda.org
ARG PIP_INDEX_URL=
COPY --from=wheels /wheels /tmp/wheels
COPY environment.yml ./
COPY locks/image.txt locks/build.txt locks/uv.txt locks/
COPY scripts/install_locked.sh scripts/uv.sh scripts/
RUN python=/opt/conda/envs/sagemaker-lightning/bin/python \
 && export UV_FOLDER=/tmp/uv UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
 && sed '/- pip:/,$d' environment.yml >/tmp/conda.yml \
 && conda env create -f /tmp/conda.yml \
 && $python -m pip install --no-deps --no-index --find-links /tmp/wheels sagemaker-training \
 && scripts/install_locked.sh $python sync --compile-bytecode locks/image.txt \
 && conda clean -afy \
 && rm -rf /tmp/wheels /tmp/uv* /tmp/conda.yml /root/.cache \
 && cd /opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages \
 && find . \( -name '*.a' -o -type d -name tests \) -prune -exec rm -rf {} + \
 && rm -rf nvidia/*/lib/libcusolverMg.so.* nvidia/nvshmem/lib/libnvshmem_device_*.bc \
        triton/backends/amd/lib triton/backends/nvidia/lib/cupti*

# Lightning Bolts' data modules, for those who have used them; LIGHTNING_BOLTS=0 leaves them out.
ARG LIGHTNING_BOLTS=1
COPY locks/bolts.txt locks/
COPY scripts/install_bolts.sh scripts/bolts_old_import.py scripts/
RUN if [ "$LIGHTNING_BOLTS" != 0 ]; then \
        UV_FOLDER=/tmp/uv UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
            scripts/install_bolts.sh "$(command -v python)" \
     && rm -rf /tmp/uv*; \
    fi

# Off unless it is set: "mlflow", "wandb" or both, for Lightning's MLFlowLogger and WandbLogger.
ARG LOGGERS=
COPY locks/mlflow.txt locks/wandb.txt locks/
RUN for name in $LOGGERS; do \
        [[ $name =~ ^(mlflow|wandb)$ ]] \
     || { echo "error: LOGGERS: found $name; allowed are mlflow and wandb" >&2; exit 1; }; \
        UV_FOLDER=/tmp/uv UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
            scripts/install_locked.sh "$(command -v python)" install --compile-bytecode "locks/$name.txt"; \
    done \
 && rm -rf /tmp/uv*

# What is in it: sbom/packages.cdx.json (CycloneDX) and sbom/licenses.txt. pip takes no malicious release for a job, either.
COPY locks/tools.txt locks/never.txt locks/
COPY scripts/make_sbom.sh scripts/
RUN export UV_FOLDER=/tmp/uv UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 TOOLS=/tmp/tools \
 && python -m venv $TOOLS \
 && scripts/install_locked.sh $TOOLS/bin/python install locks/tools.txt \
 && scripts/make_sbom.sh sbom "$(command -v python)" \
 && rm -rf /tmp/uv* $TOOLS
ENV PIP_CONSTRAINT=/opt/sagemaker-lightning/locks/never.txt \
    UV_CONSTRAINT=/opt/sagemaker-lightning/locks/never.txt

# Off unless it is set: a C++ compiler, which torch.compile takes (--model.compile); 250 MB. Python's headers are there.
ARG COMPILER=
RUN if [ -n "$COMPILER" ]; then \
        apt-get update \
     && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ \
     && rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi

# For runs outside of SageMaker: without /opt/ml/output the toolkit's `train` fails in silence, with exit status 0.
# /opt/ml/code stays empty: only then does the toolkit unpack a job's own source there.
RUN mkdir -p /opt/ml/input/config /opt/ml/input/data /opt/ml/model /opt/ml/output/data /opt/ml/code

# Run whenever this python starts: `import lightning as L` works in a script that knows nothing of ours, by the classes of
# pytorch-lightning (sagemaker_lightning/compat/namespaces.py).
RUN printf '%s\n' /opt/sagemaker-lightning "import sagemaker_lightning" \
    >/opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages/sagemaker-lightning.pth

# The code comes last: a change of it adds kilobytes.
COPY entrypoint.sh ./
COPY sagemaker_lightning sagemaker_lightning
COPY app app

# SAGEMAKER_PROGRAM is what `train` runs, SAGEMAKER_TRAINING_MODULE what runs inside `train`.
# NVIDIA_*: which GPUs and which parts of the driver the host's container runtime brings in.
ARG SAGEMAKER_PROGRAM=app/train_multi_node.py
ENV SAGEMAKER_PROGRAM=$SAGEMAKER_PROGRAM \
    SAGEMAKER_TRAINING_MODULE=sagemaker_lightning.launch.toolkit_hook:main \
    PYTHONPATH=/opt/sagemaker-lightning \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# What was built, for `docker inspect` and for the program.
ARG VERSION=
ARG REVISION=
ARG SOURCE=
ENV SAGEMAKER_LIGHTNING_VERSION=$VERSION \
    SAGEMAKER_LIGHTNING_REVISION=$REVISION
LABEL org.opencontainers.image.title="sagemaker-lightning" \
      org.opencontainers.image.description="Runs a PyTorch Lightning app under the SageMaker training toolkit" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# No USER: SageMaker runs training containers as root. CMD: SDK 3's local mode gives no command.
ENTRYPOINT ["/opt/sagemaker-lightning/entrypoint.sh"]
CMD ["train"]
