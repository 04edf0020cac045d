#!/bin/sh
# Run one of pdserve's tools from the clone: tool.sh NAME MODULE [ARGUMENTS]. The tools need only the standard library,
# plus PyYAML for --config.
# NAME is the prefix of messages. PDSERVE_PYTHON overrides the choice of Python: the clone's .venv, or else python3.
set -eu

name=$1
module=$2
shift 2
clone=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")

fail() {
    echo "$name: $1" >&2
    exit 2
}

if [ -n "${PDSERVE_PYTHON:-}" ]; then
    python=$PDSERVE_PYTHON
elif [ -x "$clone/.venv/bin/python" ]; then
    python=$clone/.venv/bin/python
else
    python=python3
fi
command -v "$python" >/dev/null 2>&1 || fail "no Python at $python: set PDSERVE_PYTHON to Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is older than Python 3.11, or does not run: set PDSERVE_PYTHON to a newer one"

PYTHONPATH=$clone${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$python" -P -m "$module" "$@"
