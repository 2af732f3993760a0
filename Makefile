# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait do not spin: on a machine that does other work too, spinning costs several times the time.
export OMP_WAIT_POLICY := PASSIVE
STAMP := .venv/installed
INTEGRATIONS := .venv/installed-integrations

.PHONY: demo test test-integrations check style bench

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $(STAMP)

$(INTEGRATIONS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[integrations]"
	$(BIN)/pip install --quiet --no-deps clip-benchmark==1.6.2
	touch $(INTEGRATIONS)

demo: $(STAMP)  ## upcycle, train and evaluate the glyph CLIP into runs/demo
	$(BIN)/python -m training.upcycle --config training/recipes/demo.yaml

# Two processes, each with whole files: tests of one file share runs of a recipe.
test: $(STAMP)  ## all tests that need no GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-integrations: $(INTEGRATIONS)  ## publishing, and every library that takes the models
	$(BIN)/python -m pytest tests/integration

check: $(STAMP)  ## read only: style and the recipes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(STAMP)  ## repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## speed, as ratios
	$(BIN)/python -m benchmarks.experts
	$(BIN)/python -m benchmarks.training_time
	$(BIN)/python -m benchmarks.assign
	$(BIN)/python -m benchmarks.balanced_kmeans
