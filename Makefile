# make run      run the lessons on this machine and write build/report.html
# make test     run every test and every notebook
# make gpu      measure everything on this machine's GPU (DEVICE=cpu proves the kit without one)
# make colab    run four lessons as Colab does, in an environment of its versions
# make pretend  run the lessons' GPU branches as on a T4 and an H100, without one (CARD=T4 does one)
# make doctor   print what a bug report needs, and whether the course can work here
# make student  copy the course for a class: no solutions, no answers (REPOSITORY=its address)
# make site     build the reading site in build/site
# make test-browser  use lessons in a real JupyterLab, in Chromium; pictures go to build/browser
# make check-rows ROWS=card.csv  read over what make gpu wrote, before you send it
# LAB="--no-browser --port 8889" hands options to JupyterLab.
# LESSONS="01 02" does a part. PYTHON=python uses an environment of your own.
LESSONS ?=
SECTIONS ?=
REPOSITORY ?=
LAB ?=
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)  # a rented card's container has no other user
ROWS ?=
CARD ?=
DEVICE ?= cuda
SYSTEM_PYTHON ?= python3
COLAB_PYTHON ?= python3.13
empty :=
space := $(empty) $(empty)

ifndef PYTHON
PYTHON := .venv/bin/python
ENVIRONMENT := .venv/installed
endif

.PHONY: install run lab test test-browser doctor site student colab pretend outputs gpu check-rows format benchmark

install: $(ENVIRONMENT)

# A clone that was moved is installed again: the stamp holds the folder it was made in.
ifneq ($(shell cat .venv/installed 2>/dev/null),$(CURDIR))
.PHONY: .venv/installed
endif

.venv/installed: pyproject.toml constraints.txt
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'The course needs Python 3.11 or newer: make install SYSTEM_PYTHON=python3.12'; exit 1; }
	@echo 'Installing into .venv: about 2 GB, a few minutes. pip says below what it is at.'
	$(SYSTEM_PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -c constraints.txt -e '.[lab,test,optimizers]' || \
		{ echo 'pip could not install the course: it says why above.' \
		'Without a network, install from a folder of wheels: see docs/teaching.md.'; exit 1; }
	@echo '$(CURDIR)' > $@

run: $(ENVIRONMENT)
	$(PYTHON) tools/run_course.py --lessons "$(LESSONS)"

lab: $(ENVIRONMENT)
	OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m jupyterlab --config tools/lab.py --preferred-dir notebooks \
		$(AS_ROOT) $(LAB)  # threads sleep, not spin

test: $(ENVIRONMENT)
	$(PYTHON) -m pytest $(if $(LESSONS),-k "$(subst $(space), or ,$(strip $(LESSONS:%=%_)))")

doctor: $(ENVIRONMENT)
	$(PYTHON) tools/doctor.py

site: $(ENVIRONMENT)
	@$(PYTHON) -c 'import myst_nb, sphinx_book_theme, sphinx_copybutton' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[site]'
	$(PYTHON) tools/build_site.py

student: $(ENVIRONMENT)
	$(PYTHON) tools/student.py --repository "$(REPOSITORY)"

test-browser: $(ENVIRONMENT)
	@$(PYTHON) -c 'import playwright' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(PYTHON) -m pytest -o addopts= -rs tests/browser

pretend: $(ENVIRONMENT)
	$(PYTHON) tests/pretend.py --card "$(CARD)" --lessons "$(LESSONS)"

# Its first cell installs into the environment, so each start puts Colab's versions back.
colab:
	test -d .venv-colab || $(COLAB_PYTHON) -m venv .venv-colab
	.venv-colab/bin/python -m pip uninstall --quiet --yes one-gpu-measured
	.venv-colab/bin/python -m pip install --quiet -r tools/colab_versions.txt
	.venv-colab/bin/python tools/colab.py $(if $(LESSONS),--lessons "$(LESSONS)")

# Recorded predictions first, because the lessons read them. A part refreshes notebooks only.
outputs: $(ENVIRONMENT)
	$(if $(LESSONS),,$(PYTHON) tools/record_predictions.py)
	$(if $(LESSONS),,$(PYTHON) tools/readme_picture.py)
	$(PYTHON) tools/trust.py
	$(PYTHON) tools/scoreboard.py
	$(PYTHON) tools/refresh_outputs.py --lessons "$(LESSONS)"
	$(PYTHON) tools/look_up.py
	$(PYTHON) tools/address.py

gpu: $(ENVIRONMENT)
	$(PYTHON) tools/gpu_kit.py $(SECTIONS) --device $(DEVICE)

check-rows: $(ENVIRONMENT)
	$(PYTHON) tools/check_rows.py $(ROWS)

format: $(ENVIRONMENT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

benchmark: $(ENVIRONMENT)
	TQDM_DISABLE=1 $(PYTHON) tests/benchmarks/trainer_overhead.py --steps 60
