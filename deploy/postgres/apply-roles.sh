#!/bin/sh
# Apply roles.sql to an external server. Passwords come from the environment and appear in no command line.
#   ADMIN_URL=postgresql://postgres:…@host/postgres APP_PASSWORD=… … sh deploy/postgres/apply-roles.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec psql "$ADMIN_URL" --no-psqlrc --quiet --set=ON_ERROR_STOP=1 <<SQL
\getenv owner_password OWNER_PASSWORD
\getenv app_password APP_PASSWORD
\getenv sys_password SYS_PASSWORD
\getenv internal_password INTERNAL_PASSWORD
\getenv gateway_password GATEWAY_PASSWORD
\i '$here/roles.sql'
SQL
