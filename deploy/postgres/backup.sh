#!/bin/sh
# Write the database into a file that restore.sh reads. The login is the owner's: its policies show all rows.
#   DATABASE_OWNER_URL=postgresql://anneal_owner:…@host/anneal sh deploy/postgres/backup.sh FILE
set -eu
umask 077
pg_dump "$DATABASE_OWNER_URL" --enable-row-security --format=custom --file="$1.part"
mv "$1.part" "$1"
