# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
INTEGRATIONS := .venv/installed-integrations
# Their requirements are many or old, and what we use of them needs none.
WITHOUT_REQUIREMENTS := clip-benchmark==1.6.2
# What clip-benchmark's command imports, in a folder of its own: with torchvision, transformers would prepare images by
# it, and the one on PyPI does not go with a CPU build of torch. With NumPy 2.4, its top-5 accuracy fails.
FOR_CLIP_BENCHMARK := braceexpand==0.1.7 ftfy==6.3.1 numpy==2.3.5 open_clip_torch==3.3.0 pycocoevalcap==1.2 pycocotools==2.0.11 \
	timm==1.0.31 torchvision==0.29.2 wcwidth==0.9.4 webdataset==1.0.2
LOWEST := .venv-lowest
# Where the code meets torch, transformers, accelerate, datasets, huggingface_hub, pydantic, Pillow and scikit-learn
LOWEST_TESTS := $(patsubst %,tests/test_%.py,checkpoints clusters compiled_layers embedder families hub images layouts \
	long_context modeling_* processors recipe runs shards sources tokenizer training upcycle)

# gradio takes no Pillow 13
APP := .venv-app
MODEL ?= training/name_clip_moe
RESULTS ?= runs/benchmarks

# What is published, made and used in an environment of its own, from a wheel. mkdocs-material warns of its successor
KIT := .venv-kit
KIT_TOOLS := build==1.6.1 ipykernel==7.4.0 mkdocs-material nbclient==0.11.0 twine==7.0.0
SPACE_MODEL ?= training/name_clip_moe
IN_KIT := cd build/kit && HF_HUB_OFFLINE=1 $(CURDIR)/$(KIT)/bin

.PHONY: kit wheel site notebook space release app demo test test-gpu test-slow test-lab test-integrations test-lowest check style docs bench bench-gpu

$(STAMP): setup.py constraints.txt
	@echo "Making .venv with the versions of constraints.txt; from PyPI, torch and its CUDA libraries are most of 6 GB"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $(STAMP)
	@echo "Done: . .venv/bin/activate gives the command clip-moe; make demo trains, make app shows, make test tests"

$(INTEGRATIONS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[integrations]"
	$(BIN)/pip install --quiet --no-deps $(WITHOUT_REQUIREMENTS)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/clip-benchmark $(FOR_CLIP_BENCHMARK)
	rm --force .venv/transformers-*.tar.gz
	$(BIN)/pip download --quiet --no-deps --no-binary transformers --dest .venv "$$(grep '^transformers==' constraints.txt)"
	tar --extract --directory .venv --file .venv/transformers-*.tar.gz
	touch $(INTEGRATIONS)

demo: $(STAMP)  ## dense and sparse models that learn names, into runs/demo
	$(BIN)/python -m clip_moe.training.upcycle --config training/recipes/demo.yaml

# Sees the packages of .venv, so that only gradio, what it needs and its Pillow are installed
$(APP)/installed: $(STAMP)
	@echo "Making $(APP): .venv with gradio and a Pillow that gradio takes"
	$(PYTHON) -m venv $(APP)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(APP)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth
	grep --invert-match '^pillow=' constraints.txt > $(APP)/constraints.txt
	$(APP)/bin/pip install --quiet --constraint $(APP)/constraints.txt --editable ".[app]"
	touch $@

app: $(APP)/installed  ## a page for a model: make app MODEL=runs/symbols/sparse_kept BASELINE=runs/symbols/dense EXAMPLES=my/images
	$(APP)/bin/clip-moe app "$(MODEL)" $(if $(BASELINE),--baseline "$(BASELINE)") $(if $(EXAMPLES),--examples "$(EXAMPLES)")

# Two processes, each with whole files: tests of one file share runs of a recipe. Threads that wait do not spin: where
# processes share cores, spinning costs several times the time, and where one has them alone, it saves time.
demo test test-slow test-lab test-integrations test-lowest: export OMP_WAIT_POLICY := PASSIVE

test: $(STAMP)  ## all tests that need no GPU, except the slow ones
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(STAMP)  ## runs on two processes, killed runs, full disks and random damage
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "slow and not gpu"

test-lab: $(STAMP)  ## what finds out whether something is true: lab/
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not gpu" tests/lab

test-integrations: $(INTEGRATIONS)  ## publishing, and every library that takes the models
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/integration

$(LOWEST)/installed: setup.py constraints.txt constraints-lowest.txt
	@echo "Making $(LOWEST) with the versions of constraints-lowest.txt: PyPI's torch 2.11 and its CUDA libraries are 6 GB"
	$(PYTHON) -m venv $(LOWEST)
	sed -n 's/^\([^#]*==\).*/^\1/p' constraints-lowest.txt > $(LOWEST)/lower
	grep --invert-match --ignore-case --file $(LOWEST)/lower constraints.txt | cat - constraints-lowest.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet --constraint $(LOWEST)/constraints.txt --editable ".[test]"
	touch $@

test-lowest: $(LOWEST)/installed  ## the tests that meet libraries, on the lowest versions that setup.py allows
	$(LOWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile $(LOWEST_TESTS)

check: $(STAMP)  ## read only: style, which room imports which, promises, and lines a room
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/promises.py
	$(BIN)/python tests/room_lines.py

style: $(STAMP)  ## repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## docs/settings.md, from the classes of the settings
	$(BIN)/python -m clip_moe.app.settings_page

# With a python that has torch for the GPU and this package: python3 -m pip install --editable '.[test]'
GPU_PYTHON ?= python3

test-gpu:  ## what needs a GPU
	$(GPU_PYTHON) -m pytest -m gpu

bench-gpu:  ## speed on a GPU: GPU_PYTHON=python3 make bench-gpu RESULTS=lab/speed/results
	mkdir -p $(RESULTS)
	-$(GPU_PYTHON) -m lab.speed.steps block --sizes ViT-B/16 ViT-L/14 --images 1 64 256 --dtype bfloat16 --output $(RESULTS)/block_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps block --sizes ViT-L/14 --images 64 --num_experts 8 --ffns 1 --parts 1 2 4 --capacity_factor null --dtype bfloat16 --output $(RESULTS)/parts_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps towers --size ViE-L/16 --images 64 --presets moe_vie --dtype bfloat16 --output $(RESULTS)/moe_vie_l16_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps inference --size ViE-H/14 --images 1 16 32 64 128 --presets moe_vie --output $(RESULTS)/moe_vie_h14_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps inference --output $(RESULTS)/inference_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps recipes --size ViT-B/16 --batch 256 --dtype bfloat16 --gradient_checkpointing false --output $(RESULTS)/real_steps_b16_gpu.md
	-$(GPU_PYTHON) -m lab.speed.steps recipes --size ViT-L/14 --batch 192 --dtype bfloat16 --gradient_checkpointing false --output $(RESULTS)/real_steps_l14_gpu.md

bench: $(STAMP)  ## the goals for speed and memory, and what is measured
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.speed.goals --output $(RESULTS)/goals_cpu.md

$(KIT)/installed: setup.py constraints.txt
	$(PYTHON) -m venv $(KIT)
	grep --invert-match '^pillow=' constraints.txt > $(KIT)/constraints.txt
	$(KIT)/bin/pip install --quiet --constraint $(KIT)/constraints.txt ".[app]" $(KIT_TOOLS)
	touch $@

kit: wheel site notebook space  ## all that is published, except models

wheel: $(KIT)/installed  ## dist/*.whl, tried outside a checkout
	rm -rf dist build/kit
	$(KIT)/bin/python -m build
	$(KIT)/bin/twine check --strict dist/*
	$(KIT)/bin/pip install --quiet --force-reinstall --no-deps dist/*.whl
	mkdir -p build/kit
	$(IN_KIT)/clip-moe recipes
	$(IN_KIT)/clip-moe upcycle sparse --model training/symbol_clip/quarter --preset clip_moe
	$(IN_KIT)/clip-moe evaluate scores --models.sparse sparse --tasks symbols_pairs

site: $(KIT)/installed  ## build/site, the documentation; a link to nothing is an error
	NO_MKDOCS_2_WARNING=1 $(KIT)/bin/mkdocs build --strict

notebook: $(KIT)/installed  ## the notebook, from its first cell to its last
	mkdir -p build/kit
	cp notebooks/first_steps.ipynb build/kit
	$(IN_KIT)/jupyter execute first_steps.ipynb

space: $(KIT)/installed  ## build/space, started once; for the Hub, make space SPACE_MODEL=OWNER/name-clip-moe
	rm -rf build/space
	$(KIT)/bin/python -m clip_moe app $(SPACE_MODEL) --examples app/pictures --space build/space
	$(KIT)/bin/python tests/integration/start_space.py build/space

release: check kit  ## all checks, then what a person does for a release
	@git diff --quiet HEAD || { echo "error: there are changes that are not committed"; exit 1; }
	@version=$$($(KIT)/bin/python setup.py --version) && grep -q "^version: $$version$$" CITATION.cff && grep -q "^## $$version" CHANGELOG.md \
		|| { echo "error: setup.py, CITATION.cff and CHANGELOG.md should name one version"; exit 1; }
	@echo "dist/ is version $$($(KIT)/bin/python setup.py --version). By hand, in this order:"
	@! git grep -lE 'OWNER/(name-)?clip-moe' || echo "1. In these files, put the account in place of OWNER, and the date into CHANGELOG.md; commit; make release"
	@echo "2. git tag v$$($(KIT)/bin/python setup.py --version) && git push --tags"
	@echo "3. $(KIT)/bin/twine upload dist/*"
	@echo "4. hf auth login; hf upload OWNER/name-clip-moe training/name_clip_moe"
	@echo "5. make space SPACE_MODEL=OWNER/name-clip-moe; hf upload OWNER/clip-moe build/space --repo-type space"
	@echo "6. $(KIT)/bin/mkdocs gh-deploy --strict"
