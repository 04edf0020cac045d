#!/bin/bash
# What a container runs. A command is run as it is; flags alone go to start_servers.sh where a ranktable is named, else
# to `pdserve serve`, one instance that does it all.
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
