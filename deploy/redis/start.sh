#!/bin/sh
# Start Valkey (or Redis) with the users of users.acl. The passwords are given, their digests are written.
#   CONTROL_PASSWORD=… TRAINER_POOL=gpu TRAINER_PASSWORD=… [OTHER_TRAINERS="pool:password …"] \
#       sh deploy/redis/start.sh [further server options]
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)
data=${DATA_DIR:-/data}

digest() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

# One trainer's line: user name, pool, password. A pool's name becomes part of a pattern of keys.
trainer() {
    case $2 in *[!A-Za-z0-9_-]* | "") echo "'$2' is no pool's name" >&2; exit 1 ;; esac
    sed -n -e "s/^user anneal_trainer /user $1 /" -e "s/TRAINER_POOL/$2/g" \
        -e "s/TRAINER_PASSWORD_SHA256/$(digest "$3")/" -e "/^user $1 /p" "$here/users.acl"
}

# An ACL file may hold nothing but users.
{
    sed -n -e "s/CONTROL_PASSWORD_SHA256/$(digest "$CONTROL_PASSWORD")/" \
        -e '/^user default /p' -e '/^user anneal_control /p' "$here/users.acl"
    trainer anneal_trainer "${TRAINER_POOL:-gpu}" "$TRAINER_PASSWORD"
    for other in ${OTHER_TRAINERS:-}; do
        trainer "anneal_trainer_${other%%:*}" "${other%%:*}" "${other#*:}"
    done
} > "$data/users.acl"

exec "${SERVER:-valkey-server}" --dir "$data" --aclfile "$data/users.acl" --appendonly yes --appendfsync everysec \
    --maxmemory "${MAXMEMORY:-1gb}" --maxmemory-policy noeviction "$@"
