#!/bin/bash
# Installs libfabric and aws-ofi-nccl into the image, by AWS's EFA installer. The Dockerfile runs it, as root.
#
#   EFA_URL=... EFA_SHA256=... scripts/install_efa.sh
#
# The kernel's module and the limits are the host's. What the installer would verify is a device, which no build has.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 1
}

home=$(dirname "$(dirname "$(readlink -f "$0")")")
folder=$(mktemp -d)
"$home/scripts/fetch.sh" EFA "$folder/installer.tar.gz"
tar --extract --gzip --file "$folder/installer.tar.gz" --directory "$folder"
apt-get update
(cd "$folder/aws-efa-installer" && DEBIAN_FRONTEND=noninteractive ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify) ||
    fail "EFA: AWS's installer failed (see above); does it know this base image? EFA_URL may name a newer one"
rm -rf "$folder" /var/lib/apt/lists/* /var/cache/apt/*

# NCCL asks the system's linker for libnccl-net.so: on the path of libraries, whoever starts the process.
for library in libfabric.so.1 libnccl-net.so; do
    found=$(find /opt/amazon -name "$library" | sort | head -n 1)
    [[ -n $found ]] || fail "EFA: the installer has left no $library below /opt/amazon; EFA_URL may name an older or newer one"
    dirname "$found"
done >/etc/ld.so.conf.d/sagemaker-lightning-efa.conf
ldconfig
