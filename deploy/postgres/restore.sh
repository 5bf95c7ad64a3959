#!/bin/sh
# Restore a file of backup.sh into an empty database that apply-roles.sh has made. All or nothing.
#   DATABASE_OWNER_URL=postgresql://anneal_owner:…@host/anneal sh deploy/postgres/restore.sh FILE
set -eu
pg_restore --dbname="$DATABASE_OWNER_URL" --single-transaction --exit-on-error "$1"
psql "$DATABASE_OWNER_URL" --no-psqlrc --quiet --command=ANALYZE
