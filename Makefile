# The front door. Every target makes the virtual environment itself when it is missing or stale.
PYTHON ?= python3
VENV := .venv
# These watch processes by the clock: nothing else runs beside them.
TIMED := tests/unit/test_shim.py tests/unit/test_colocation_modes.py
# These do not, and share the cores with the unit tests.
UNTIMED := $(addprefix tests/contract/test_,$(addsuffix .py,colocation_dry_run colocation_facts device_registry freezing freezing_restarts gpu_doctor gpu_suite host_agent_gpu hung_mps launcher launcher_checkpoints launcher_faults launcher_leases launcher_torchrun nvml_backend nvml_library nvml_links nvml_standin operator_mix policies power_limit wheel))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: run test check bench colocation models docs clean lock venv

run: venv  ## the demo: real jobs share devices; four to twelve minutes; build/demo/report.html
	$(BIN)/python examples/demo.py --out build/demo

test: check  ## everything that gates a commit: check, then unit, contract and cluster tests
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/unit $(UNTIMED) $(TIMED:%=--ignore=%)
	$(BIN)/python -m pytest -q $(TIMED) tests/contract tests/cluster $(UNTIMED:%=--ignore=%)

check: venv  ## lint, formatting, types, walls between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv  ## all benchmarks, about half an hour; tables on the terminal, JSON in build/bench
	mkdir -p build/bench
	set -e; for script in sampler sampler_nvml overhead workloads shares core latency recovery loop characterise interference coldstart forecast forecast_levels forecast_cost prm; do \
	  echo "== $$script"; $(BIN)/python benchmarks/$$script.py --json build/bench/$$script.json; done

colocation: venv  ## measure how workloads share a device of this machine; 40 minutes, idle machine; resumable
	$(BIN)/python -m benchmarks.colocation --device cpu --out build/colocation/cpu

models: venv  ## fit the models that ship to the measurements that ship
	$(BIN)/cotenant train interference cpu --ship
	$(BIN)/cotenant train coldstart cpu --ship

docs: venv  ## regenerate the documents that are made from code (OpenAPI)
	$(BIN)/python -m cotenant.dashboards.openapi

clean:  ## remove what the targets above made
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

lock: venv  ## write requirements/lock.txt from what is installed
	{ sed -n 1p requirements/lock.txt; $(BIN)/pip freeze --all --exclude pip --exclude wheel --exclude-editable | sed 's/+cpu//'; } > requirements/lock.new
	mv requirements/lock.new requirements/lock.txt

venv: $(STAMP)

$(STAMP): requirements/lock.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@echo 'installing into $(VENV): 2 GB, some minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)
