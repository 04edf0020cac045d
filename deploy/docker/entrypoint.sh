#!/bin/bash
# A container's entrypoint. A command is run unchanged; bare flags are passed to start_servers.sh if a ranktable is set,
# else to `pdserve serve`, one combined instance.
set -eu
clone=$(dirname -- "$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")")
if [ -d /usr/local/Ascend ]; then . "$clone/deploy/docker/ascend_env.sh"; fi
case ${1:-} in
    -*)
        if [ -n "${GLOBAL_RANK_TABLE_FILE_PATH:-}" ]; then
            exec sh "$clone/deploy/PD_separate/start_servers.sh" "$@"
        fi
        exec "$clone/.venv/bin/pdserve" serve "$@"
        ;;
    '') exec /bin/bash ;;
    *) exec "$@" ;;
esac
