#!/bin/sh
# Install what an image needs beside Python: a C compiler, which builds the native parts for the CPU that they run on,
# and git where torchvision_npu is built. Nothing is done for what is there already.
set -eu

wanted=
command -v gcc >/dev/null 2>&1 || wanted="gcc"
if [ "${1:-}" = git ]; then command -v git >/dev/null 2>&1 || wanted="$wanted git"; fi
[ -n "$wanted" ] || exit 0

if command -v apt-get >/dev/null 2>&1; then
    apt-get update
    # shellcheck disable=SC2086  # words
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $wanted libc6-dev ca-certificates
    rm -rf /var/lib/apt/lists/*
elif command -v dnf >/dev/null 2>&1; then
    # shellcheck disable=SC2086  # words
    dnf install -y $wanted glibc-devel
    dnf clean all
elif command -v yum >/dev/null 2>&1; then
    # shellcheck disable=SC2086  # words
    yum install -y $wanted glibc-devel
    yum clean all
else
    echo "install_tools.sh: no apt-get, dnf or yum to install $wanted with" >&2
    exit 1
fi
