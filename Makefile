# Every verb works on a fresh clone with Python 3.11+ and make; `make` alone lists them.
PYTHON ?= python3
WEB    := .venv/bin/python
ENGINES := .venv-engines/bin/python
PYTEST := $(WEB) -m pytest
MANAGE := $(WEB) -m scripts.with_services manage.py

# Without bytecode every start compiles its whole library anew: vLLM alone three times, a minute instead of 25 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-tools setup-dev setup-gguf demo demo-ci dev test test-all test-quick test-unit test-browser test-engines test-e2e \
        test-durations nightly chaos fuzz check audit fix migrations \
        translations openapi docs errors shell screenshots cli gpu-check family-matrix bench-rehearsal simulate clean

help: ## list the verbs
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/; s/%/NAME/' | expand -t 16

# --- run ---------------------------------------------------------------------------------------------------------

setup: ## create the two environments and install locked dependencies
	@$(PYTHON) scripts/setup.py

setup-gguf: ## add llama.cpp's converter, for exports as GGUF; a folder of its own
	@$(PYTHON) scripts/setup.py --gguf

demo: ## start everything, run the main job, keep running (Ctrl-C stops it all)
	@$(PYTHON) scripts/up.py --main-job

demo-ci: ## the main job and a QLoRA job, then exit; the last line is one JSON object
	@$(PYTHON) scripts/up.py --ci

dev: ## start everything with reload, without the main job
	@$(PYTHON) scripts/up.py --reload

# --- test --------------------------------------------------------------------------------------------------------

setup-tools: # what checks, locks and documents need on top
	@$(PYTHON) scripts/setup.py --dev

setup-dev: # what the tests need on top
	@$(PYTHON) scripts/setup.py --dev --browser

test: setup-dev ## all tests but the slow ones, side by side; the last line counts them
	$(WEB) -m scripts.test

test-all: setup-dev ## also the slow tests, as CI runs them
	$(WEB) -m scripts.test --all

test-quick: setup-dev ## the tests nearest to the current change, within a minute
	$(WEB) -m scripts.test --quick

test-unit: setup-dev # unit, API, web and guard tests on both cores
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not chaos" tests/unit tests/integration tests/api tests/guards tests/web

test-engines: setup-dev # trainer and vLLM in their own environment
	$(WEB) -m scripts.test training serving

test-browser: setup-dev # journeys on system Chromium
	$(WEB) -m scripts.test browser

test-e2e: setup-dev # the whole platform as processes, short selection
	$(WEB) -m scripts.test e2e

test-durations: setup-dev # all tests; keeps what each file took, by which the longest start first
	$(WEB) -m scripts.test --record

# These two run every line, whatever an earlier one finds, and fail at the end.
nightly: setup-dev setup-gguf ## before a release: external services, GGUF, vLLM with images and as canary, long searches; and make audit
	@status=0; set -x; \
	$(WEB) -m scripts.test --nightly || status=1; \
	$(PYTEST) --hypothesis-profile=thorough -m hypothesis tests/unit || status=1; \
	$(PYTEST) --hypothesis-profile=thorough tests/browser || status=1; \
	$(ENGINES) -m pytest -c tests/engines/pytest.ini --rootdir . tests/engines/training/publishing/test_gguf.py || status=1; \
	$(ENGINES) -m tests.bench.families || status=1; \
	$(WEB) -m scripts.dependencies.audit || status=1; \
	exit $$status

family-matrix: setup-dev ## each model family in miniature through the whole product; the last line is one JSON object
	$(ENGINES) -m tests.bench.families

chaos: setup-dev ## kill -9 of web, worker API, gateway, celery, trainer and engine at every point of a job (long)
	@status=0; set -x; \
	$(PYTEST) -m chaos tests/e2e tests/unit/payments tests/integration/billing tests/api/gateway || status=1; \
	$(ENGINES) -m pytest -c tests/engines/pytest.ini --rootdir . -m chaos tests/engines/serving || status=1; \
	exit $$status

simulate: SEEDS ?= 10000
simulate: setup-tools ## the control plane in virtual time under faults, SEEDS=10000; the last line is one JSON object
	$(WEB) -m tests.fuzz.simulation --seeds $(SEEDS)

fuzz: SECONDS ?= 3600
fuzz: setup-dev ## random input for API, gateway and readers, SECONDS=3600; the last line is one JSON object
	$(WEB) -m tests.fuzz --seconds $(SECONDS)

bench-rehearsal: setup-dev ## memory traced without a GPU, against real tensors and the formula
	$(WEB) -m tests.bench.rehearsal

bench-%: setup-dev ## one benchmark of tests/bench, e.g. make bench-estimates
	$(WEB) -m tests.bench.$*

gpu-check: setup ## on a new CUDA machine: drivers, kernels, training and vLLM against quotes; POST=1 reports the points
	@$(ENGINES) -m gpu_workers.bench.gpu_check $(if $(POST),--post)

# --- write -------------------------------------------------------------------------------------------------------

check: setup-tools ## lint, format, types, import contracts, migrations, deployment checks
	$(WEB) -m ruff check .
	$(WEB) -m ruff format --check .
	.venv/bin/djangofmt --check templates
	$(MANAGE) check
	$(MANAGE) makemigrations --check --dry-run
	$(WEB) -m scripts.with_services $(WEB) -m mypy
	.venv/bin/lint-imports

audit: setup-tools ## known vulnerabilities of all locked versions; needs PyPI, and fails where it does not answer
	$(WEB) -m scripts.dependencies.audit

fix: setup-tools ## format and repair what ruff can
	$(WEB) -m ruff check --fix .
	$(WEB) -m ruff format .
	.venv/bin/djangofmt templates

migrations: setup-tools ## write migrations for changed models
	$(WEB) -m scripts.with_services --role owner manage.py makemigrations

translations: setup-tools ## add new texts to the catalogues in locale, and compile what is translated
	$(WEB) -m scripts.assets.translations

openapi: setup ## the OpenAPI document of the API, into docs/openapi.json
	$(WEB) -m scripts.with_services $(WEB) -m scripts.assets.openapi

docs: setup ## the documentation as a site of plain files, into dist/docs, with its search; URL=https://… in samples
	$(WEB) -m scripts.with_services $(WEB) -m scripts.assets.docs_site $(if $(URL),--url $(URL))

errors: setup ## the page about error codes, docs/errors.md, from the code that raises them
	$(WEB) -m scripts.with_services $(WEB) -m scripts.assets.error_codes

shell: setup ## a Django shell as the role of management commands, all tenants in view
	$(MANAGE) shell

screenshots: setup-dev ## a picture of every page of a running demo, into .anneal/screenshots; README=1 renews the README's
	$(WEB) -m scripts.screenshots $(if $(README),--readme)

cli: setup-tools ## the wheel of the command line, into dist/, and its reference in docs/cli.md
	$(WEB) -m cli.wheel
	$(WEB) -m cli.reference

clean: ## remove the environments and all data under .anneal
	rm -rf .venv .venv-engines .anneal dist .mypy_cache .ruff_cache .pytest_cache
