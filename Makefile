# The Literate Transformer: everything starts here. `make help` lists the commands.
# A fresh machine needs Python 3.11 or newer and make, nothing else.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
PORT   ?= 8000
JOBS   ?= 2

# How much the chapters compute: small (a CPU, minutes) or full (a GPU).
export TRANSFORMER_LIB_SCALE ?= small
# A folder with offline copies of the corpora; where there is none, they are fetched.
TRANSFORMER_LIB_MIRROR ?= $(abspath $(wildcard ../shared/data))
export TRANSFORMER_LIB_MIRROR
# uv does not read pip's settings: hand it the one that names a folder of wheels.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export PYTHONUTF8 = 1

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := _build/.stamps
LOGS   := _build/logs
ENV    := $(VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

NOTEBOOKS := $(wildcard notebooks/*.ipynb)
LIBRARY   := $(shell find transformer_lib -name '*.py' -o -name '*.toml' 2>/dev/null)
PAGES     := $(shell find book -type f -not -path '*/__pycache__/*' 2>/dev/null)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: book test serve export edit lint lock clean distclean help notebooks env \
        check-sync FORCE

# $(call step,name,command): run quietly, say how long it took, show the log on failure.
define step
@mkdir -p $(LOGS); start=$$(date +%s); \
if { $(2); } > $(LOGS)/$(1).log 2>&1; \
then printf '%-12s done in %s s\n' '$(1)' $$(($$(date +%s) - start)); \
else code=$$?; tail -n 40 $(LOGS)/$(1).log >&2; \
printf '\n%s failed; all it said is in %s\n' '$(1)' $(LOGS)/$(1).log >&2; exit $$code; fi
endef

book: env $(STAMPS)/export notebooks $(STAMPS)/html  ## set up, run every chapter, build the book
	@echo; echo "The book is at file://$(CURDIR)/_build/html/index.html"
	@echo "To read it in the browser with everything working: make serve"

test: env check-sync lint notebooks $(STAMPS)/html  ## everything that must hold
	@$(BIN)/python -m pytest

serve: book  ## build the book and show it on http://localhost:8000 (PORT=...)
	@echo "http://localhost:$(PORT)  (Ctrl-C ends it)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

export: env  ## write the library from the notebooks
	@rm -f $(STAMPS)/export
	@$(MAKE) --no-print-directory $(STAMPS)/export

edit: env  ## CHAPTER=02_attention: notebook to editable text, and back when it was edited
	@$(BIN)/python book/_tools/edit.py "$(CHAPTER)"

lint: env  ## check the code's style
	$(call step,lint,$(BIN)/ruff check .)

lock: env  ## compile requirements.lock anew from pyproject.toml
	@echo '$(TORCH)' > $(VENV)/torch.txt
	$(call step,lock,$(BIN)/uv pip compile pyproject.toml --all-extras --upgrade \
	  --no-emit-package torch -c $(VENV)/torch.txt --python-version 3.11 --no-header \
	  --no-emit-find-links -o requirements.lock)

clean:  ## remove everything built (the environment stays)
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

distclean: clean  ## remove the environment too
	rm -rf $(VENV) *.egg-info

help:  ## this list
	@echo "The Literate Transformer"; echo
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/\1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

# --- steps ---------------------------------------------------------------------------

env: $(ENV)

$(ENV): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	  "Name another: make book PYTHON=python3.12" >&2; exit 1; }
	$(call step,environment,sh book/_tools/setup.sh '$(PYTHON)' '$(VENV)' '$(TORCH)')
	@touch $@

$(STAMPS)/export: $(ENV) $(NOTEBOOKS)
	$(call step,export,$(BIN)/nbdev-export)
	@mkdir -p $(STAMPS); touch $@

check-sync: env
	$(call step,sync,$(BIN)/python -m pytest -q tests/test_sync.py)

notebooks: env
	@echo "chapters"
	@$(BIN)/python book/_tools/run_notebooks.py -j $(JOBS)

# The names of all files of the book: changes when one comes or goes.
$(STAMPS)/files: FORCE
	@mkdir -p $(STAMPS); printf '%s\n' $(sort $(NOTEBOOKS) $(PAGES) $(LIBRARY)) > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(STAMPS)/html: $(ENV) $(STAMPS)/files _config.yml _toc.yml $(NOTEBOOKS) $(PAGES) \
                $(LIBRARY) $(wildcard _build/timings.json)
	$(call step,html,$(BIN)/jupyter-book build -W -n --keep-going .)
	@touch $@
