#!/bin/sh
# Install the clone into its .venv, with the image's Python and packages:
#   install_pdserve.sh cpu|cuda|npu [TORCH [TORCH_NPU]]
#
# An image's own torch is kept; TORCH and TORCH_NPU are the versions to pin.
set -eu
cd "$(dirname -- "$0")/../.."

device=$1
pin() { [ -z "$2" ] || sed -i "s/^$1==.*/$1==$2/" constraints.txt; }
pin torch "${2:-}"
pin torch_npu "${3:-}"

# Native libraries are only used if they belong to the running user: root's are removed here, and the Dockerfile builds
# ma-user's.
work=$(mktemp -d)
export PDSERVE_RUN_DIR="$work" PDSERVE_CACHE_DIR="$work/cache" PIP_NO_CACHE_DIR=1
python3 -m venv --system-site-packages .venv
scripts/install --device "$device" || {
    cat "$work/install.log" >&2
    exit 1
}
.venv/bin/python -m compileall -q -x "[.]venv" .
rm -rf "$work"
# A clone made with a strict umask is not readable by ma-user.
chmod -R a+rX .
