#!/bin/sh
# Print (or, with --run, run) the guide's docker run line for one role, with the devices of its table.
exec sh "$(dirname -- "$(readlink -f -- "$0")")/tool.sh" docker_run.sh pdserve.container_command docker_run "$@"
