#!/bin/sh
# Build the inference image as the guide does: --base-image=IMAGE --image-name=NAME [--with-torchvision-npu].
exec sh "$(dirname -- "$(readlink -f -- "$0")")/tool.sh" build_image.sh pdserve.container_command build_image "$@"
