# make serve   install what is needed, prepare the example once, start the scheduler
# make test    install what is needed, run the whole suite        (ARGS="-k ledger" chooses)
# make lint    style, types, imports and dependencies
# make chaos   real models, kills and memory pressure for MINUTES=20, drawn from SEED=n (docs/soak.md)
# make dist    sdist and wheel, and the wheel tried in an empty environment
#
# Needs a Python >= 3.11 with venv and pip (PYTHON=... names one). Paths are relative and tools run as `python -m`:
# all of it works in a folder with a space in its name.

.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
STATE := var
ARGS :=
MINUTES := 20
SEED :=

.PHONY: help serve test lint chaos dist clean

help:
	@sed -n '1,5s/^# //p' Makefile

serve:
	@sh .ci/venv base
	@$(PY) -m gpuledger.tools.examples "$(STATE)"
	@exec .venv/bin/gpuledger serve --config "$(STATE)/gpuledger.yaml" $(ARGS)

test:
	@sh .ci/venv base test
	@exec sh .ci/test $(ARGS)

lint:
	@sh .ci/venv base test lint
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy tests
	$(PY) -m pyright
	$(PY) .venv/bin/lint-imports
	$(PY) -m deptry .

chaos:
	@sh .ci/venv base test
	@exec $(PY) -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

dist:
	@sh .ci/venv base test lint
	@rm -rf build dist
	$(PY) -m build --outdir dist .
	$(PY) .ci/try_wheel.py

clean:
	@rm -rf build dist .import/gpuledger.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
