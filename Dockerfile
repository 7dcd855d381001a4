# A container that trains a PyTorch Lightning application on SageMaker. scripts/build_image.sh builds it and explains ARGs.
# Layers come in the order in which they change: system, conda, packages, code, version.
# Plain instructions only (no heredocs, no --mount, no syntax line): BuildKit and the legacy builder both build it.
#
# Built twice from one commit, the layers of packages and of code are the same bytes, so nothing in them has the time of the
# build. A RUN ends with scripts/finish_layer.sh, which gives its files one date, and deletes nothing of an earlier layer, as
# the mark of a deletion has a time. Our own files get that date in the stage `files`, below a folder for each place that
# needs them, and are copied from there to /: to any other folder, COPY would give that folder the time of the build.

# No CUDA base image: the CUDA libraries come with the torch wheel, the driver comes from the host.
ARG BASE_IMAGE=ubuntu:24.04@sha256:008173c23f95b170204355c12626cb5a965d779a7e1283b09e9cffbb1bf33ca3
# That date, in seconds since 1970: the first of 1980, as a zip file has no earlier one. A commit's own date would make each
# commit build all layers again.
ARG SOURCE_DATE_EPOCH=315532800
# The environment's Python, and the build of torch: empty for PyPI's, or cpu, cu126, ... (locks/image-$TORCH.txt).
ARG PYTHON_VERSION=3.11
ARG TORCH=


# ---- files: our own, with one date and one mode ---------------------------------------------------------------------

FROM ${BASE_IMAGE} AS files
ARG PYTHON_VERSION
ARG SOURCE_DATE_EPOCH

# Where /etc/hosts is missing, older engines make it for each RUN and remove it again, which changes the date of /etc.
RUN mkdir -p /files/base/etc && echo '127.0.0.1 localhost' >/files/base/etc/hosts

# For runs outside of SageMaker: without /opt/ml/output the toolkit's `train` fails in silence, with exit status 0.
# /opt/ml/code stays empty: only then does the toolkit unpack a job's own source there.
RUN cd /files && mkdir -p runtime/opt/ml/input/config runtime/opt/ml/input/data runtime/opt/ml/model \
    runtime/opt/ml/output/data runtime/opt/ml/code

# Run whenever the image's python starts: `import lightning as L` works in a script that knows nothing of ours, by the classes
# of pytorch-lightning (sagemaker_lightning/compat/namespaces.py).
RUN site=/files/runtime/opt/conda/envs/sagemaker-lightning/lib/python$PYTHON_VERSION/site-packages \
 && mkdir -p $site && printf '%s\n' /opt/sagemaker-lightning "import sagemaker_lightning" >$site/sagemaker-lightning.pth

WORKDIR /files/base/opt/sagemaker-lightning
COPY scripts/fetch.sh scripts/finish_layer.sh scripts/
WORKDIR /files/environment/opt/sagemaker-lightning
COPY environment.yml locks/conda*.txt ./
COPY scripts/make_conda_environment.sh scripts/
WORKDIR /files/wheels/opt/sagemaker-lightning
COPY locks/build.txt locks/toolkit.txt locks/
WORKDIR /files/packages/opt/sagemaker-lightning
COPY locks/image*.txt locks/build.txt locks/uv.txt locks/
COPY scripts/install_locked.sh scripts/uv.sh scripts/
WORKDIR /files/bolts/opt/sagemaker-lightning
COPY locks/bolts.txt locks/
COPY scripts/install_bolts.sh scripts/bolts_old_import.py scripts/
WORKDIR /files/loggers/opt/sagemaker-lightning
COPY locks/mlflow.txt locks/wandb.txt locks/
WORKDIR /files/tools/opt/sagemaker-lightning
COPY locks/tools.txt locks/never.txt locks/
COPY scripts/make_sbom.sh scripts/
WORKDIR /files/efa/opt/sagemaker-lightning
COPY scripts/install_efa.sh scripts/
WORKDIR /files/runtime/opt/sagemaker-lightning
COPY sagemaker_lightning sagemaker_lightning
WORKDIR /files/app/opt/sagemaker-lightning
COPY sagemaker_lightning/launch/entrypoint.sh ./
COPY app app
# Any user may write to /opt/ml where nothing is mounted: docker run --user=1000.
RUN chmod -R u=rwX,go=rX /files && chmod -R a+w /files/runtime/opt/ml && find /files -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +


# ---- system: what comes from apt ------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY --from=files /files/base /

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

# Outside of /opt/ml, which is SageMaker's: it mounts over it.
WORKDIR /opt/sagemaker-lightning


# ---- base: Miniconda ------------------------------------------------------------------------------------------------

FROM system AS base

# It is checked before it runs. conda-forge replaces its `defaults` channel, which has other terms of use.
ARG MINICONDA_URL=https://repo.anaconda.com/miniconda/Miniconda3-py311_24.11.1-0-Linux-x86_64.sh
ARG MINICONDA_SHA256=807774bae6cd87132094458217ebf713df436f64779faf9bb4c3d4b6615c1e3a
ARG SOURCE_DATE_EPOCH
ARG PYTHONDONTWRITEBYTECODE=1
RUN scripts/fetch.sh MINICONDA /tmp/miniconda.sh \
 && bash /tmp/miniconda.sh -b -p /opt/conda \
 && rm /tmp/miniconda.sh \
 && echo 'channels: [conda-forge]' >/opt/conda/.condarc \
 && /opt/conda/bin/conda clean -afy \
 && scripts/finish_layer.sh


# ---- environment: what comes from conda, python among it ------------------------------------------------------------

FROM base AS environment

# Found by a shell that nothing has activated: SageMaker's SDK 3 goes round ENTRYPOINT and asks for bash, python, pip.
ENV PATH=/opt/conda/envs/sagemaker-lightning/bin:/opt/conda/bin:$PATH

# conda reads its argument under the argument's name.
ARG CONDA_CHANNEL_ALIAS=https://conda.anaconda.org
ARG PYTHON_VERSION
ARG TORCH
ARG SOURCE_DATE_EPOCH
ARG PYTHONDONTWRITEBYTECODE=1
COPY --from=files /files/environment /
RUN scripts/make_conda_environment.sh && scripts/finish_layer.sh


# ---- wheels: what has to be compiled, so that no compiler gets into the image ---------------------------------------

FROM base AS wheels

# sagemaker-training comes as source only and has a small C extension. python's own headers are conda's.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev

# Built with the setuptools that is locked, and without debugging information, which names folders of a random name. pip reads
# PIP_INDEX_URL itself and takes empty as its default. No password in it: `docker history` shows it.
ARG PIP_INDEX_URL=
ARG SOURCE_DATE_EPOCH
COPY --from=environment /opt/conda/envs /opt/conda/envs
COPY --from=files /files/wheels /
RUN /opt/conda/envs/sagemaker-lightning/bin/python -m venv /tmp/build \
 && { /tmp/build/bin/python -m pip install --require-hashes -r locks/build.txt \
   && CFLAGS=-g0 /tmp/build/bin/python -m pip wheel --require-hashes --no-build-isolation --no-deps \
          --wheel-dir /built/opt/sagemaker-lightning/wheels -r locks/toolkit.txt \
   || { echo "error: locks/toolkit.txt: sagemaker-training cannot be built, see above; if a hash differs, the index serves" \
            "another file than the one that was locked: do not use it; if the index lacks a package, set PIP_INDEX_URL to one" \
            "that has it" >&2; exit 1; }; } \
 && find /built -exec touch --date="@$SOURCE_DATE_EPOCH" {} +


# ---- the image ------------------------------------------------------------------------------------------------------

FROM environment

# uv installs what environment.yml has under `pip:` as locked, by version and SHA-256, in one layer with its cleaning.
# Removed is what nothing here can use: static libraries (no linker), tests, torch's protoc, the multi-GPU cuSOLVER (torch does
# not link it), NVSHMEM's device bitcode (it takes a compiler), Triton's AMD code generator and its profiler's copies of CUPTI.
# TORCH=cpu is to be small, too: it has no byte code (training starts some seconds later), no headers for a compiler, none
# of Arrow's remote procedure calls (Flight), and TensorBoard reads its files by Python alone.
ARG PIP_INDEX_URL=
ARG TORCH
ARG TORCH_INDEX_URL=
ARG SOURCE_DATE_EPOCH
ARG PYTHONDONTWRITEBYTECODE=1
COPY --from=wheels /built /
COPY --from=files /files/packages /
RUN python=$(command -v python) \
 && export UV_FOLDER=/tmp/uv UV_NO_CACHE=1 UV_INSTALLER=/opt/conda/bin/python PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
 && $UV_INSTALLER -m pip --python $python install --no-compile --no-deps --no-index --find-links wheels sagemaker-training \
 && scripts/install_locked.sh $python sync locks/image${TORCH:+-$TORCH}.txt \
 && rm -rf /tmp/uv* /root/.cache \
 && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find . \( -name '*.a' -o -type d -name tests \) -prune -exec rm -rf {} + \
 && rm -rf nvidia/*/lib/libcusolverMg.so.* nvidia/nvshmem/lib/libnvshmem_device_*.bc \
        triton/backends/amd/lib triton/backends/nvidia/lib/cupti* torch/test \
 && find . -path './torch/bin/*' -type f ! -name torch_shm_manager -delete \
 && if [ "$TORCH" = cpu ]; then \
        rm -rf torch/include pyarrow/include pyarrow/libarrow_flight* pyarrow/libarrow_substrait* \
            tensorboard_data_server/bin \
         && python=; \
    fi \
 && /opt/sagemaker-lightning/scripts/finish_layer.sh $python

# Lightning Bolts' data modules, for those who have used them; LIGHTNING_BOLTS=0 leaves them out.
ARG LIGHTNING_BOLTS=1
COPY --from=files /files/bolts /
RUN if [ "$LIGHTNING_BOLTS" != 0 ]; then \
        UV_FOLDER=/tmp/uv UV_NO_CACHE=1 UV_INSTALLER=/opt/conda/bin/python PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
            scripts/install_bolts.sh "$(command -v python)" \
     && rm -rf /tmp/uv* \
     && scripts/finish_layer.sh $([ "$TORCH" = cpu ] || echo python); \
    fi

# Off unless it is set: "mlflow", "wandb" or both, for Lightning's MLFlowLogger and WandbLogger.
ARG LOGGERS=
COPY --from=files /files/loggers /
RUN if [ -n "$LOGGERS" ]; then \
        export UV_FOLDER=/tmp/uv UV_NO_CACHE=1 UV_INSTALLER=/opt/conda/bin/python PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
     && for name in $LOGGERS; do \
            [[ $name =~ ^(mlflow|wandb)$ ]] \
         || { echo "error: LOGGERS: found $name; expected mlflow or wandb" >&2; exit 1; }; \
            scripts/install_locked.sh "$(command -v python)" install "locks/$name.txt" || exit 1; \
        done \
     && rm -rf /tmp/uv* \
     && scripts/finish_layer.sh $([ "$TORCH" = cpu ] || echo python); \
    fi

# What is in it: sbom/packages.cdx.json (CycloneDX) and sbom/licenses.txt. pip takes no malicious release for a job, either.
COPY --from=files /files/tools /
RUN export UV_FOLDER=/tmp/uv UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 TOOLS=/tmp/tools \
 && python -m venv $TOOLS \
 && scripts/install_locked.sh $TOOLS/bin/python install locks/tools.txt \
 && scripts/make_sbom.sh sbom "$(command -v python)" \
 && rm -rf /tmp/uv* $TOOLS \
 && scripts/finish_layer.sh
ENV PIP_CONSTRAINT=/opt/sagemaker-lightning/locks/never.txt \
    UV_CONSTRAINT=/opt/sagemaker-lightning/locks/never.txt

# Off unless it is set: a C++ compiler, which torch.compile takes (--model.compile); 250 MB. Python's headers are there.
ARG COMPILER=
RUN if [ -n "$COMPILER" ]; then \
        apt-get update \
     && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ \
     && rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi

# Off unless it is set: libfabric and aws-ofi-nccl, by which NCCL uses EFA, the fast network between AWS's large GPU hosts.
# AWS publishes the checksums of its installer in EC2's user guide, "Verify the EFA installer using a checksum".
ARG EFA=
ARG EFA_URL=https://efa-installer.amazonaws.com/aws-efa-installer-1.46.0.tar.gz
ARG EFA_SHA256=8302bd7849afb95c903a875d7dcb6f85b3d7629e9a8b67d020031cfc6f4d0ee1
COPY --from=files /files/efa /
RUN if [ -n "$EFA" ]; then scripts/install_efa.sh; fi

# The code comes last: a change of it adds kilobytes.
COPY --from=files /files/runtime /
COPY --from=files /files/app /

# SAGEMAKER_PROGRAM is what `train` runs, SAGEMAKER_TRAINING_MODULE what runs inside `train`.
# BASH_ENV: SDK 3 starts a job's own source by bash, in place of the entry point.
# NVIDIA_*: which GPUs and which parts of the driver the host's container runtime brings in.
# MALLOC_*: freed blocks of up to 128 MiB stay with the process, which uses them again in the next step. Otherwise the
# kernel takes and gives them page by page: a quarter of the processor time of a step on the CPU (benchmarks/malloc.py).
ARG SAGEMAKER_PROGRAM=app/train_multi_node.py
ENV SAGEMAKER_PROGRAM=$SAGEMAKER_PROGRAM \
    SAGEMAKER_TRAINING_MODULE=sagemaker_lightning.launch.toolkit_hook:main \
    BASH_ENV=/opt/sagemaker-lightning/sagemaker_lightning/launch/bash_env.sh \
    PYTHONPATH=/opt/sagemaker-lightning \
    PYTHONUNBUFFERED=1 \
    MALLOC_TRIM_THRESHOLD_=536870912 \
    MALLOC_MMAP_THRESHOLD_=134217728 \
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
