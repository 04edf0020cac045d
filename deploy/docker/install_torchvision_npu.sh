#!/bin/bash
# Build torchvision_npu as the guide does: install_torchvision_npu.sh URL TAG TORCHVISION. TAG is the v0.N.x-... that
# build_image.sh chose for the image's torch, TORCHVISION is the matching 0.N.
set -eu
url=$1
tag=$2
torchvision=$3
python=/opt/pdserve/.venv/bin/python

. /opt/pdserve/deploy/docker/ascend_env.sh
work=$(mktemp -d)
git clone --quiet --depth 1 --branch "$tag" "$url" "$work/vision_npu"
cd "$work/vision_npu"
"$python" -m pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}" \
    "torchvision==$torchvision.*"
"$python" -m pip install --no-cache-dir setuptools wheel -r requirement.txt
"$python" setup.py bdist_wheel
"$python" -m pip install --no-cache-dir --no-deps dist/torchvision_npu-"$torchvision".*.whl
rm -rf "$work"
