#!/bin/sh
# Give an image the user ma-user, uid 1000: make_user.sh [ROOT]. ROOT is where its /etc is (default: /).
#
# A driver's device nodes are uid 1000's, and HCCL fails with more than one rank (error 19) where that uid has no entry
# in /etc/passwd. Lines are appended, so that no image needs useradd; another user with that uid stays as it is.
set -eu
root=${1:-}
passwd=$root/etc/passwd
group=$root/etc/group

fail() {
    echo "make_user.sh: $1" >&2
    exit 1
}

[ -f "$passwd" ] && [ -f "$group" ] || fail "$passwd and $group: not both there"
while IFS=: read -r name _ uid _; do
    [ "$name" = ma-user ] || continue
    [ "$uid" = 1000 ] || fail "ma-user is uid $uid in $passwd, and must be 1000: take another base image"
    exit 0
done <"$passwd"
grep -q '^[^:]*:[^:]*:1000:' "$group" || echo 'ma-user:x:1000:' >>"$group"
# The shadow file has no line for it: nobody logs in with a password.
echo 'ma-user:x:1000:1000:ModelArts user:/home/ma-user:/bin/bash' >>"$passwd"
