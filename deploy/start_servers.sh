#!/bin/sh
# The same launcher as PD_separate/start_servers.sh.
exec sh "$(dirname -- "$(readlink -f -- "$0")")/PD_separate/start_servers.sh" "$@"
