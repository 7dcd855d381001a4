#!/usr/bin/env bash
# A stand-in for AWS's EFA installer, for tests on machines that do not reach AWS: the script within its archive.
#
# It takes exactly the flags that scripts/install_efa.sh gives, and leaves empty libraries in the folders in which the real one
# leaves its own on Ubuntu, and an fi_info that knows the provider.
set -euo pipefail

[[ $* == "--yes --skip-kmod --skip-limit-conf --no-verify" ]] || { echo "unknown flags: $*" >&2; exit 1; }
mkdir -p /opt/amazon/efa/lib /opt/amazon/efa/bin /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu
touch /opt/amazon/efa/lib/libfabric.so.1
touch /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/{libnccl-net-ofi.so,libnccl-net.so}
printf '#!/bin/sh\necho "provider: efa"\n' >/opt/amazon/efa/bin/fi_info
chmod +x /opt/amazon/efa/bin/fi_info
