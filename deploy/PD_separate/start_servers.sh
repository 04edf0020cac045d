#!/bin/sh
# Start one process of the cluster, as the guide does. Its role comes from the tables:
#   GLOBAL_RANK_TABLE_FILE_PATH  the global ranktable, the same file everywhere
#   RANK_TABLE_FILE_PATH         the local ranktable of this process
#   NODE_PORTS, USE_OPENAI       for the scheduler only
# The flags are pdserve's. PDSERVE_PYTHON overrides the choice of Python: the clone's .venv, or else python3.
set -eu

# torch_npu would take this variable as its own and build its groups from the file.
unset RANK_TABLE_FILE

fail() {
    echo "start_servers.sh: $1" >&2
    exit 2
}

script=$(readlink -f -- "$0")
clone=$(dirname -- "$(dirname -- "$(dirname -- "$script")")")

if [ -n "${PDSERVE_PYTHON:-}" ]; then
    python=$PDSERVE_PYTHON
elif [ -x "$clone/.venv/bin/python" ]; then
    python=$clone/.venv/bin/python
else
    python=python3
fi
command -v "$python" >/dev/null 2>&1 || fail "no Python at $python: run scripts/install, or set PDSERVE_PYTHON"

# Print the first needed module that cannot be found. -P keeps the current folder out of the import path.
first_missing() {
    "$python" -P -c 'from importlib.util import find_spec
print(next((name for name in ("pdserve", "fastapi") if find_spec(name) is None), ""))' 2>/dev/null ||
        fail "$python is older than Python 3.11, or does not run: run scripts/install"
}

missing=$(first_missing)
if [ "$missing" = pdserve ]; then
    PYTHONPATH=$clone${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    missing=$(first_missing)
fi
[ -z "$missing" ] || fail "$python cannot import $missing: run scripts/install"

exec "$python" -P -m pdserve.launch "$@"
