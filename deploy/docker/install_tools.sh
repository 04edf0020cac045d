#!/bin/sh
# Install what an image needs besides Python: a C compiler, which builds the native libraries at the end of the build of
# the image; with `install_tools.sh vision` also g++ and git, for torchvision_npu. Tools that exist are left alone.
set -eu

there() { command -v "$1" >/dev/null 2>&1; }

cplusplus=g++
if ! there apt-get; then cplusplus=gcc-c++; fi
wanted=
there gcc || wanted="gcc"
if [ "${1:-}" = vision ]; then
    there g++ || wanted="$wanted $cplusplus"
    there git || wanted="$wanted git"
fi
[ -n "$wanted" ] || exit 0

if there apt-get; then
    apt-get update
    # shellcheck disable=SC2086  # words
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $wanted libc6-dev ca-certificates
    rm -rf /var/lib/apt/lists/*
elif there dnf; then
    # shellcheck disable=SC2086  # words
    dnf install -y $wanted glibc-devel
    dnf clean all
elif there yum; then
    # shellcheck disable=SC2086  # words
    yum install -y $wanted glibc-devel
    yum clean all
else
    echo "install_tools.sh: cannot install $wanted: the image has no apt-get, dnf or yum" >&2
    exit 1
fi
