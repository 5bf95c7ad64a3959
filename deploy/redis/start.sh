#!/bin/sh
# Start Valkey (or Redis) with the users of users.acl. The passwords are given, their digests are written.
#   CONTROL_PASSWORD=… TRAINER_PASSWORD=… sh deploy/redis/start.sh [further server options]
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)
data=${DATA_DIR:-/data}

digest() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

# An ACL file may hold nothing but users.
sed -n -e "s/CONTROL_PASSWORD_SHA256/$(digest "$CONTROL_PASSWORD")/" \
    -e "s/TRAINER_PASSWORD_SHA256/$(digest "$TRAINER_PASSWORD")/" \
    -e '/^user /p' "$here/users.acl" > "$data/users.acl"

exec "${SERVER:-valkey-server}" --dir "$data" --aclfile "$data/users.acl" --appendonly yes --appendfsync everysec \
    --maxmemory "${MAXMEMORY:-1gb}" --maxmemory-policy noeviction "$@"
