# What each target does, the file that does it and what that writes: tools/README.md.
# LESSONS="01 02" does a part. PYTHON=python uses an environment of your own.
# LAB="--no-browser --port 8889" hands options to JupyterLab, REPOSITORY=... is the address of a
# copy for a class, ROWS=card.csv a file that make gpu wrote, CARD=T4 one of two pretended cards,
# DEVICE=cpu proves make gpu without a card.
LESSONS ?=
SETS ?=
SECTIONS ?=
REPOSITORY ?=
LAB ?=
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)  # a rented card's container has no other user
ROWS ?=
RESULTS ?= build/tests.xml
CARD ?=
DEVICE ?= cuda
TAG ?=
SYSTEM_PYTHON ?= python3
COLAB_PYTHON ?= python3.13
empty :=
space := $(empty) $(empty)

ifndef PYTHON
PYTHON := .venv/bin/python
ENVIRONMENT := .venv/installed
endif

.PHONY: install run lab test test-browser doctor site student sheets colab pretend evidence outputs \
	gpu check-rows minutes what-moved format benchmark release-check

install: $(ENVIRONMENT)

# A clone that was moved is installed again: the stamp holds the folder it was made in.
ifneq ($(shell cat .venv/installed 2>/dev/null),$(CURDIR))
.PHONY: .venv/installed
endif

.venv/installed: pyproject.toml constraints.txt
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'The course needs Python 3.11 or newer: make install SYSTEM_PYTHON=python3.12'; exit 1; }
	@echo 'Installing into .venv: about 3 GB, a few minutes. pip says below what it is at.'
	$(SYSTEM_PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -c constraints.txt -e '.[lab,test,optimizers]' || \
		{ echo 'pip could not install the course: it says why above.' \
		'Without a network, install from a folder of wheels: see docs/teaching.md.'; exit 1; }
	@echo '$(CURDIR)' > $@

run: $(ENVIRONMENT)
	$(PYTHON) -m tools.run --lessons "$(LESSONS)"

lab: $(ENVIRONMENT)
	OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m jupyterlab --config tools/lab.py --preferred-dir notebooks \
		$(AS_ROOT) $(LAB)  # threads sleep, not spin

test: $(ENVIRONMENT)
	$(PYTHON) -m pytest $(if $(LESSONS),-k "$(subst $(space), or ,$(strip $(LESSONS:%=%_)))")

doctor: $(ENVIRONMENT)
	$(PYTHON) -m tools.doctor

site: $(ENVIRONMENT)
	@$(PYTHON) -c 'import myst_nb, sphinx_book_theme, sphinx_copybutton' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[site]'
	$(PYTHON) -m tools.site

student: $(ENVIRONMENT)
	$(PYTHON) -m tools.student --repository "$(REPOSITORY)"

sheets: $(ENVIRONMENT)
	$(PYTHON) -m tools.sheets

test-browser: $(ENVIRONMENT)
	@$(PYTHON) -c 'import playwright' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(PYTHON) -m pytest -o addopts= -rs tests/browser

pretend: $(ENVIRONMENT)
	$(PYTHON) -m tools.pretend --card "$(CARD)" --lessons "$(LESSONS)"

# Its first cell installs into the environment, so each start puts Colab's versions back.
colab:
	test -d .venv-colab || $(COLAB_PYTHON) -m venv .venv-colab
	.venv-colab/bin/python -m pip uninstall --quiet --yes one-gpu-measured
	.venv-colab/bin/python -m pip install --quiet -r tools/colab_versions.txt
	.venv-colab/bin/python -m tools.colab $(if $(LESSONS),--lessons "$(LESSONS)")

# SETS="fms liger" makes a part; python -m evidence --help says more.
evidence: $(ENVIRONMENT)
	$(PYTHON) -m evidence $(SETS)

outputs: $(ENVIRONMENT)
	$(PYTHON) -m tools.outputs --lessons "$(LESSONS)"

gpu: $(ENVIRONMENT)
	$(PYTHON) -m tools.gpu $(SECTIONS) --device $(DEVICE)

check-rows: $(ENVIRONMENT)
	$(PYTHON) -m tools.check_rows $(ROWS)

minutes: $(ENVIRONMENT)
	$(PYTHON) -m tools.minutes --lessons "$(LESSONS)"

# After python -m pytest --junitxml=build/tests.xml
what-moved: $(ENVIRONMENT)
	@$(PYTHON) -m tools.what_moved $(RESULTS)

format: $(ENVIRONMENT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# TAG=v0.1.0 has to be the tag of the version.
release-check: $(ENVIRONMENT)
	$(PYTHON) -m tools.release_check $(if $(TAG),--tag $(TAG))

benchmark: $(ENVIRONMENT)
	TQDM_DISABLE=1 $(PYTHON) -m tools.benchmark --steps 60
