# Every target is a command that a person could type. `make` alone prints them.
.DEFAULT_GOAL := help
.PHONY: help env train test test-thorough test-fast compat compat-next soak mutants zoo projects strangers loaders lint format lock lock-conda docs wheel test-wheel version-tag publish sbom audit build run push rehearsal benchmark scaling gpu clean

PYTHON ?= python3
IMAGE ?= sagemaker-lightning
VENV := .venv
# Without it, each process of a run of the tests would compile all tests again: 11 s of processor time.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env: $(VENV)/ready  ## make the Python environment in .venv (done by the targets that need it)
LOCKED := locks/tests.txt locks/toolkit.txt locks/bolts.txt scripts/make_env.sh scripts/install_bolts.sh
$(VENV)/ready: $(LOCKED)
	PYTHON=$(PYTHON) scripts/make_env.sh $(VENV)

train: $(VENV)/ready  ## train on the embedded data, by the SageMaker toolkit, without Docker; files go to output/ml
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=$(CURDIR) SAGEMAKER_BASE_DIR=$(CURDIR)/output/ml \
	SAGEMAKER_PROGRAM=app/train_multi_node.py \
	SAGEMAKER_TRAINING_MODULE=sagemaker_lightning.launch.toolkit_hook:main ./entrypoint.sh train

test: $(VENV)/ready  ## run the tests, four side by side; those of the image need a Docker engine
	$(BIN)/python -m pytest -n 4 $(FLAGS)

test-thorough: $(VENV)/ready  ## each night: variants of the image, and claims of those tests by other clients and with more hosts
	$(BIN)/python -m pytest -n 4 -m thorough $(FLAGS)

test-fast: $(VENV)/ready  ## run the quick tests, which start no container and no process that imports torch: at each save
	$(BIN)/python -m pytest -n 2 -m "not slow and not docker" $(FLAGS)

LIGHTNING ?= 2.5.2
PACKAGE ?= pytorch-lightning
WITH ?=
COMPAT := .venvs/$(PACKAGE)-$(LIGHTNING)$(if $(WITH),-with-others)
$(COMPAT)/ready: $(LOCKED)
	PYTHON=$(PYTHON) scripts/make_env.sh $(COMPAT) $(PACKAGE)==$(LIGHTNING) $(WITH)

UNIT_COMPATIBLE := $(addprefix tests/unit/compat/test_,$(addsuffix .py,jsonargparse_types lightning_callbacks_called lightning_checkpoints_refused lightning_loaders lightning_loops lightning_metrics_continued lightning_trainer \
	metrics_states namespaces random_generators torch_compile_settings torch_data torch_modules_hooks versions))
COMPATIBLE := -n 2 -m "not docker and not soak" tests/compat $(UNIT_COMPATIBLE) tests/unit/data/test_deterministic.py \
	tests/unit/data/test_batch_order.py tests/unit/data/test_sample_seeding.py tests/unit/data/test_seeding.py tests/integration/test_exact_resume.py tests/integration/test_data_that_change.py \
	tests/integration/test_process_left_as_it_was.py tests/integration/test_where_runs_begin_and_end.py tests/integration/test_what_checkpoints_hold.py \
	tests/unit/data/loaders tests/integration/test_interruptions.py tests/integration/test_strangers.py tests/integration/test_logger_runs.py
compat: $(COMPAT)/ready  ## run the tests of what is ours and Lightning's with another one (LIGHTNING=2.5.2, the oldest; PACKAGE=lightning; WITH="torch~=2.11.0 torchvision")
	$(COMPAT)/bin/python -m pytest $(COMPATIBLE) $(FLAGS)

NEXT := .venvs/next
# PyTorch has its pre-releases on an index of its own. This environment alone takes a Lightning that is too new for others.
compat-next:  ## run them with the newest pre-releases of Lightning and torch
	PYTHON=$(PYTHON) TORCH=test/cpu scripts/make_env.sh $(NEXT) --prerelease=allow --upgrade pytorch-lightning torch torchvision
	echo 'import sagemaker_lightning.compat.versions as v; v.TOO_NEW_LIGHTNING = "1000"' >>"$$(echo $(NEXT)/lib/python*/site-packages/sagemaker-lightning.pth)"
	$(NEXT)/bin/python -m pytest $(COMPATIBLE) $(FLAGS)

soak: $(VENV)/ready  ## run hundreds of random interruptions, damaged folders and mutated jobs: an hour
	$(BIN)/python -m pytest -n 2 -m soak $(FLAGS)

mutants: $(VENV)/ready  ## change the code in 200 places, one at a time, and print what no quick test finds: five minutes
	$(BIN)/python tests/tools/mutants.py $(FLAGS)

zoo: $(VENV)/ready  ## interrupt user code of many kinds at random moments (FLAGS="run --help" lists its flags)
	$(BIN)/python -m tests.zoo $(FLAGS)

projects: $(VENV)/ready  ## interrupt public packages that train by Lightning, at random moments (FLAGS="lightly darts --rounds=3")
	$(BIN)/python -m tests.tools.real_projects $(FLAGS)

strangers: $(VENV)/ready  ## interrupt programs with a Trainer of their own, at random moments, on two ranks, too (FLAGS="a.py b.py --ranks=2")
	$(BIN)/python -m tests.tools.strangers $(FLAGS)

loaders: $(VENV)/ready  ## interrupt trainings on the loaders of other libraries, at random (FLAGS="timm --rounds=1")
	$(BIN)/python -m tests.foreign_loaders $(FLAGS)

TOOLS := .venvs/tools
$(TOOLS)/locked.txt: locks/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	scripts/install_locked.sh $(TOOLS)/bin/python install $<
	cp $< $@

lint: $(VENV)/ready $(TOOLS)/locked.txt  ## check style, imports, types, shell scripts and the forge's workflows (by actionlint, too, where it is installed)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tests/tools/prose.py
	$(TOOLS)/bin/mypy --python-executable $(BIN)/python
	$(TOOLS)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS)/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(TOOLS)/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(TOOLS)/bin/zizmor --offline --quiet .github
	git ls-files '*.sh' .ci/run | xargs $(TOOLS)/bin/shellcheck
	if command -v actionlint >/dev/null; then actionlint -shellcheck=$(TOOLS)/bin/shellcheck; else echo "no actionlint here: workflows checked by their schemas and zizmor alone"; fi

format: $(VENV)/ready  ## put the code into its style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## write locks/ again after a change of a list of packages (FLAGS="--upgrade" takes newer ones, too; TORCH=cpu locks another build of torch)
	UV_INSTALLER=$(PYTHON) scripts/make_lock.sh $(FLAGS)

DOCKER ?= docker
PYTHON_VERSION ?= 3.11
lock-conda:  ## lock what conda itself has installed in IMAGE, so that later builds install the same files (PYTHON_VERSION, TORCH: as it was built)
	$(DOCKER) run --rm $(IMAGE) conda list --name sagemaker-lightning --explicit --sha256 >locks/conda.part
	mv locks/conda.part locks/conda-$(PYTHON_VERSION)$(if $(TORCH),-$(TORCH)).txt

DOCS := .venvs/docs
$(DOCS)/locked.txt: locks/docs.txt
	$(PYTHON) -m venv $(DOCS)
	scripts/install_locked.sh $(DOCS)/bin/python install $<
	cp $< $@

docs: $(DOCS)/locked.txt  ## build a site of the pages, with a reference from the docstrings, in output/docs; each link must lead somewhere
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file scripts/docs/mkdocs.yml --site-dir $(CURDIR)/output/docs
	@echo output/docs/index.html

wheel: $(TOOLS)/locked.txt  ## build the wheel and the source archive in output/dist
	rm -rf output/dist
	$(TOOLS)/bin/uv build --quiet --out-dir output/dist

test-wheel: wheel $(VENV)/ready  ## install that wheel into an empty environment, and use it there
	WHEEL="$$(echo "$(CURDIR)"/output/dist/*.whl)" $(BIN)/python -m pytest -n 2 tests/integration/test_package.py $(FLAGS)

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' sagemaker_lightning/__init__.py)
version-tag:  ## check that this commit has the tag of its version: the image takes its version from the tag, the wheel from __version__
	@git tag --points-at HEAD | grep -qx "v$(VERSION)" || { echo "error: found no tag v$(VERSION) on this commit; git tag v$(VERSION), or set __version__"; exit 1; }

PACKAGE_INDEX ?=
publish: version-tag  ## upload what is in output/dist to PyPI, or to PACKAGE_INDEX, an index's address for uploads, with PACKAGE_INDEX_TOKEN
	$(if $(PACKAGE_INDEX),UV_PUBLISH_TOKEN="$$PACKAGE_INDEX_TOKEN") scripts/uv.sh publish \
		$(if $(PACKAGE_INDEX),--publish-url "$(PACKAGE_INDEX)",--trusted-publishing always) output/dist/*

sbom:  ## copy the lists of IMAGE's Python packages and their licences to output/sbom
	mkdir -p output/sbom
	$(DOCKER) run --rm $(IMAGE) cat sbom/packages.cdx.json >output/sbom/packages.cdx.json
	$(DOCKER) run --rm $(IMAGE) cat sbom/licenses.txt >output/sbom/licenses.txt

audit: $(TOOLS)/locked.txt  ## look the locked packages up in a database of known vulnerabilities, which must be reachable
	$(TOOLS)/bin/pip-audit --strict --no-deps --disable-pip --requirement locks/image.txt --requirement locks/bolts.txt $(FLAGS) || \
		{ echo "error: a package has a known vulnerability, or the database could not be asked: see above"; exit 1; }

build:  ## build the image (IMAGE, BASE_IMAGE, ...: see scripts/build_image.sh; FLAGS are docker's)
	IMAGE=$(IMAGE) scripts/build_image.sh $(FLAGS)

run:  ## train in the image on the embedded data; the model is in output/model
	mkdir -p output/model
	$(DOCKER) run --rm -v $(CURDIR)/output/model:/opt/ml/model $(IMAGE) train

push:  ## push the image to REPOSITORY: NAME in your Amazon ECR registry, or HOST/NAME (after docker login)
	@test -n "$(REPOSITORY)" || { echo "error: REPOSITORY is not set; make push REPOSITORY=NAME (Amazon ECR) or REPOSITORY=HOST/NAME"; exit 1; }
	IMAGE=$(IMAGE) scripts/push_image.sh $(REPOSITORY)

REHEARSAL := .venvs/rehearsal
$(REHEARSAL)/locked.txt: locks/rehearsal.txt
	$(PYTHON) -m venv $(REHEARSAL)
	scripts/install_locked.sh $(REHEARSAL)/bin/python install $<
	cp $< $@

rehearsal: $(REHEARSAL)/locked.txt  ## a SageMaker on this machine, spot interruptions included (FLAGS="--help" lists its flags)
	$(REHEARSAL)/bin/python -m sagemaker_rehearsal $(FLAGS)

benchmark: $(VENV)/ready  ## measure, as ratios in one run: images/s against bare PyTorch and the original's recipe, start-up
	PATH="$(CURDIR)/$(BIN):$$PATH" ./entrypoint.sh python -m benchmarks

scaling: $(VENV)/ready  ## measure what two nodes of one core each bring over one, against plain DDP: five minutes
	PATH="$(CURDIR)/$(BIN):$$PATH" ./entrypoint.sh python -m benchmarks.scaling local

gpu:  ## measure all on one GPU, 35 minutes (FLAGS="--help" lists its flags); with .venv if it is there, else by PYTHON
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(FLAGS)

clean:  ## remove the environments and everything below output/
	rm -rf $(VENV) .venvs output
