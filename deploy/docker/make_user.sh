#!/bin/sh
# Give an image the user ma-user, uid 1000: make_user.sh [ROOT]. ROOT is the folder that contains its /etc (default: /).
#
# The driver's device nodes belong to uid 1000, and HCCL fails with more than one rank (error 19) if that uid has no
# entry in /etc/passwd. Lines are appended, so that no image needs useradd; another user with that uid is left unchanged.
set -eu
root=${1:-}
passwd=$root/etc/passwd
group=$root/etc/group

fail() {
    echo "make_user.sh: $1" >&2
    exit 1
}

[ -f "$passwd" ] && [ -f "$group" ] || fail "$passwd or $group is missing"
while IFS=: read -r name _ uid _; do
    [ "$name" = ma-user ] || continue
    [ "$uid" = 1000 ] || fail "ma-user has uid $uid in $passwd, but must have 1000: use another base image"
    exit 0
done <"$passwd"
grep -q '^[^:]*:[^:]*:1000:' "$group" || echo 'ma-user:x:1000:' >>"$group"
# The shadow file has no line for ma-user, so nobody can log in with a password.
echo 'ma-user:x:1000:1000:ModelArts user:/home/ma-user:/bin/bash' >>"$passwd"
