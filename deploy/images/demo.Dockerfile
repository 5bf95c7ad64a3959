# `make demo` in one container: for macOS, for Windows, and for a Linux without a supported Python (demo.compose.yaml).
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home anneal && mkdir /srv/anneal && chown anneal: /srv/anneal
USER anneal
WORKDIR /srv/anneal
# The dependencies change less often than the code: a layer of their own.
COPY --chown=anneal: scripts/__init__.py scripts/machine.py scripts/setup.py scripts/
COPY --chown=anneal: scripts/installation scripts/installation
COPY --chown=anneal: requirements requirements
RUN python scripts/setup.py && rm -rf /home/anneal/.cache
COPY --chown=anneal: . .
ENV PYTHONUNBUFFERED=1
VOLUME /srv/anneal/.anneal
EXPOSE 8000
CMD ["python", "scripts/up.py", "--main-job"]
