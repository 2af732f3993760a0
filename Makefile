# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait do not spin: on a machine that does other work too, spinning costs several times the time.
export OMP_WAIT_POLICY := PASSIVE
STAMP := .venv/installed
INTEGRATIONS := .venv/installed-integrations
# They require much that the parts we use do not, or old versions of it.
WITHOUT_REQUIREMENTS := clip-benchmark==1.6.2 llava-torch==1.2.2.post1
# Of test-transformers.
TRANSFORMERS ?= 5.17.0
OTHER := .venv-transformers-$(TRANSFORMERS)

.PHONY: demo test test-integrations test-transformers check style docs bench

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $(STAMP)

$(INTEGRATIONS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[integrations]"
	$(BIN)/pip install --quiet --no-deps $(WITHOUT_REQUIREMENTS)
	touch $(INTEGRATIONS)

demo: $(STAMP)  ## upcycle, train and evaluate the symbol CLIP into runs/demo
	$(BIN)/python -m training.upcycle --config training/recipes/demo.yaml

# Two processes, each with whole files: tests of one file share runs of a recipe.
test: $(STAMP)  ## all tests that need no GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-integrations: $(INTEGRATIONS)  ## publishing, and every library that takes the models
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/integration

$(OTHER)/installed: setup.py constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep --invert-match --regexp '^transformers=' --regexp '^tokenizers=' --regexp '^huggingface_hub=' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --constraint $(OTHER)/constraints.txt --editable ".[integrations]" transformers==$(TRANSFORMERS)
	$(OTHER)/bin/pip install --quiet --no-deps $(WITHOUT_REQUIREMENTS)
	touch $@

test-transformers: $(OTHER)/installed  ## all tests on another version: make test-transformers TRANSFORMERS=5.17.0
	$(OTHER)/bin/python -m pytest --numprocesses 2 --dist loadfile --override-ini norecursedirs='.*'

check: $(STAMP)  ## read only: style, and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

style: $(STAMP)  ## repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## docs/settings.md, from the comments of the settings
	$(BIN)/python -m training.settings_page

bench: $(STAMP)  ## speed, as ratios
	$(BIN)/python -m benchmarks.experts
	$(BIN)/python -m benchmarks.training_time
	$(BIN)/python -m benchmarks.assign
	$(BIN)/python -m benchmarks.balanced_kmeans
	$(BIN)/python -m benchmarks.import_time
