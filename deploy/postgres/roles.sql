-- The database roles of Anneal and the database they share. Idempotent; PostgreSQL 16 or newer.
--
--   psql "$ADMIN_URL" -X -v ON_ERROR_STOP=1 -v owner_password=… -v app_password=… -v sys_password=… \
--        -v internal_password=… -v gateway_password=… [-v database=anneal] -f deploy/postgres/roles.sql
--
-- Run it as a superuser, or as the administrator of a managed server (CREATEROLE + CREATEDB).
-- A password left out stays as it is: the embedded server authenticates by its private socket directory.
--
--   anneal_owner     migrations only: owns the database; CREATEDB so that tests can make theirs
--   anneal_app       web: sees one organization at a time under forced row-level security
--   anneal_sys       Celery, management commands, staff pages: reaches all tenants by an explicit policy per table
--   anneal_internal  the worker API
--   anneal_gateway   the inference gateway
--
-- Tables, grants on them and policies belong to anneal_owner and come with the migrations.

\set QUIET on
\if :{?database}
\else
  \set database anneal
\endif

SELECT current_setting('server_version_num')::int < 160000 AS too_old \gset
\if :too_old
  DO $$ BEGIN RAISE EXCEPTION 'Anneal needs PostgreSQL 16 or newer: GRANT … WITH INHERIT FALSE, SET TRUE'; END $$;
\endif

-- SQL has no CREATE ROLE IF NOT EXISTS. The attributes are spelled out so that a changed default cannot widen them.
SELECT format('CREATE ROLE %I LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOREPLICATION %s', name, extra)
  FROM (VALUES ('anneal_owner', 'CREATEDB'), ('anneal_app', 'NOCREATEDB'), ('anneal_sys', 'NOCREATEDB'),
               ('anneal_internal', 'NOCREATEDB'), ('anneal_gateway', 'NOCREATEDB')) AS wanted (name, extra)
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted.name)
\gexec

\if :{?owner_password}
  ALTER ROLE anneal_owner PASSWORD :'owner_password';
\endif
\if :{?app_password}
  ALTER ROLE anneal_app PASSWORD :'app_password';
\endif
\if :{?sys_password}
  ALTER ROLE anneal_sys PASSWORD :'sys_password';
\endif
\if :{?internal_password}
  ALTER ROLE anneal_internal PASSWORD :'internal_password';
\endif
\if :{?gateway_password}
  ALTER ROLE anneal_gateway PASSWORD :'gateway_password';
\endif

-- Roles that existed before this file may carry more than they should; under either attribute row-level security is off.
DO $$
DECLARE
  excess text;
BEGIN
  SELECT string_agg(rolname, ', ') INTO excess FROM pg_roles
   WHERE rolname IN ('anneal_owner', 'anneal_app', 'anneal_sys', 'anneal_internal', 'anneal_gateway')
     AND (rolsuper OR rolbypassrls OR rolcreaterole OR rolreplication);
  IF excess IS NOT NULL THEN
    RAISE EXCEPTION 'these roles must not be SUPERUSER, BYPASSRLS, CREATEROLE or REPLICATION: %', excess;
  END IF;
END $$;

-- The roles that serve requests have limits of time, so that no request holds a connection, or what others wait for,
-- without end. The longest list, export or search takes seconds. A request that puts a file of gigabytes together
-- leaves its transaction idle for minutes. PostgreSQL 17 and later also limit a transaction of many short statements.
-- A limit goes with the login: staff pages keep it when they widen their role. anneal_owner, which migrates, and
-- anneal_sys, which works on whole tables, have none.
SELECT current_setting('server_version_num')::int >= 170000 AS is_17 \gset
SELECT format('ALTER ROLE %I SET %s = %L', role, name, value)
  FROM unnest(ARRAY['anneal_app', 'anneal_internal', 'anneal_gateway']) AS serving (role),
       (VALUES ('statement_timeout', '30s'), ('lock_timeout', '15s'),
               ('idle_in_transaction_session_timeout', '30min'), ('transaction_timeout', '45min')) AS wanted (name, value)
 WHERE name <> 'transaction_timeout' OR :'is_17'
\gexec

-- The worker API prepares its large statements (apps/core/database/prepared.py). By default PostgreSQL plans one anew
-- for each call if it rates a plan for all values as more expensive; planning can take longer than running.
ALTER ROLE anneal_internal SET plan_cache_mode = 'force_generic_plan';

-- Staff pages widen themselves by SET LOCAL ROLE inside one transaction; nothing is inherited silently.
GRANT anneal_sys TO anneal_app WITH INHERIT FALSE, SET TRUE;
-- The owner may act as each of them, so that tests and data repairs can run under the policies they check.
GRANT anneal_app, anneal_sys, anneal_internal, anneal_gateway TO anneal_owner WITH INHERIT FALSE, SET TRUE;

-- A managed administrator is no superuser and may hand a database only to a role it could become.
SELECT format('GRANT anneal_owner TO %I WITH INHERIT TRUE, SET TRUE', current_user)
 WHERE NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
\gexec
-- Text is compared by its bytes: fast, the same on every machine, and one index serves LIKE as well.
\if :is_17
  \set locale 'LOCALE_PROVIDER builtin BUILTIN_LOCALE ''C.UTF-8'' LOCALE ''C'''
\else
  \set locale 'LC_COLLATE ''C'' LC_CTYPE ''C.UTF-8'''
\endif
SELECT format('CREATE DATABASE %I OWNER anneal_owner ENCODING ''UTF8'' %s TEMPLATE template0', :'database', :'locale')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'database')
\gexec

SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', :'database') \gexec
SELECT format('GRANT CONNECT ON DATABASE %I TO anneal_app, anneal_sys, anneal_internal, anneal_gateway', :'database') \gexec

\connect :database
-- Schema public belongs to the owner of the database since PostgreSQL 15; nobody else creates anything in it.
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO anneal_app, anneal_sys, anneal_internal, anneal_gateway;
