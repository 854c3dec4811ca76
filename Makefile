# The Literate Transformer: everything starts here; `make help` lists the commands.
# A fresh machine needs Python 3.11 or newer and make, nothing else.

PYTHON ?= python3
# What is installed: this torch, and the rest as the lock says. LOCK=none takes the
# newest versions that pyproject.toml allows.
TORCH  ?= torch==2.13.0
LOCK   ?= requirements.lock
PORT   ?= 8000
RECIPE ?= tatoeba-en-de
JOBS   ?= 2

# How much the chapters compute: small (a CPU, minutes) or full (a GPU).
TRANSFORMER_LIB_SCALE  ?= small
# uv does not read pip's settings: hand it the one that names a folder of wheels.
UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export TRANSFORMER_LIB_SCALE UV_FIND_LINKS
export PYTHONUTF8 := 1
# Modules are compiled once, not in each of the many processes.
export PYTHONDONTWRITEBYTECODE :=

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := _build/.stamps
LOGS   := _build/logs
ENV    := $(VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/*/*.ipynb)
PAGES     := $(shell find book -type f -not -path '*/__pycache__/*' -not -path '*/_tools/*')
LIBRARY   := $(shell find transformer_lib -name '*.py' -o -name '*.pyi' -o -name '*.toml' \
               -o -name '*.json' -o -name '*.safetensors')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: book check test serve pdf slides export edit evidence lint dist tag colab lock clean distclean help \
        env library notebooks check-sync FORCE

# Of a test: one thread; where it asks for two, the one that waits leaves its core to others.
ONE := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# $(call step,name,command): one line with the time it took; its words where it fails.
define step
@mkdir -p $(LOGS); start=$$(date +%s); \
if { $(2); } > $(LOGS)/$(1).log 2>&1; \
then printf '%-12s %5s s\n' '$(1)' $$(($$(date +%s) - start)); \
else grep -E 'WARNING|ERROR' $(LOGS)/$(1).log >&2 || tail -n 40 $(LOGS)/$(1).log >&2; \
printf '\n%s failed. All that it said is in %s\n' '$(1)' $(LOGS)/$(1).log >&2; exit 1; fi
endef

book: env library notebooks $(STAMPS)/html  ## set up, run every chapter, build the book
	@echo
	@echo "The book is built: file://$(CURDIR)/_build/html/index.html"
	@echo "To read it with everything working: make serve"

check: env check-sync lint  ## style, types, the library, and all tests that are fast: three minutes
	@$(ONE) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	  -m "not slow and not pages" $(TESTS)

test: env check-sync lint notebooks $(STAMPS)/web  ## set up, and check everything that must hold
	@$(BIN)/python book/_tools/browser.py || true  # what it lacks is said again at the end
# The pages take one core, before all others. Beside them the tests begin; those that read
# the pages wait for the file $$told. Two workers more than cores: while a browser starts,
# a core is idle.
	@told=$(CURDIR)/$(STAMPS)/told; rm -f $$told; \
	{ said=failed; $(MAKE) --no-print-directory $(STAMPS)/html && said=built; \
	  echo $$said > $$told.new; mv $$told.new $$told; } & \
	LITERATE_BOOK=$$told $(ONE) nice -n 5 $(BIN)/python -m pytest \
	  -n $$(($(JOBS) + 2)) --dist loadfile --no-loadscope-reorder $(TESTS); status=$$?; \
	wait; grep -qx built $$told && exit $$status; \
	echo 'The pages could not be built:'; grep -E 'WARNING|ERROR' $(LOGS)/pages.log; exit 1

serve: book  ## build the book and serve it on this machine (PORT=8000)
	@echo "http://localhost:$(PORT)  (Ctrl-C ends it)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

pdf: book  ## the built book as one PDF: _build/book.pdf
	@$(BIN)/python book/_tools/browser.py
	@$(BIN)/python book/_tools/pdf.py

slides: book  ## CHAPTER=02_attention: slides made from the page of a chapter
	@$(BIN)/python book/_tools/slides.py "$(CHAPTER)"

export: env  ## write the library transformer_lib from the notebooks
	@$(BIN)/python book/_tools/export.py
	@mkdir -p $(STAMPS); touch $(STAMPS)/library

edit: env  ## CHAPTER=02_attention: the notebook as text to edit, and back when it was edited
	@$(BIN)/python book/_tools/edit.py "$(CHAPTER)"

evidence: env library  ## RECIPE=tatoeba-en-de: train and score it (hours); or QUEUE=all, all long runs
ifdef QUEUE
	@$(BIN)/python experiments/queue_runs.py $(filter-out all,$(QUEUE)) $(WORKERS)
else
	@$(BIN)/python experiments/evidence.py "$(RECIPE)"
endif

lint: env  ## check the style and the types of all code
	$(call step,style,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call step,types,$(BIN)/mypy)

dist: env  ## TAG=v0.1.0: the wheel and the source of that version, in _build/dist
	@$(BIN)/python book/_tools/release.py --check "$(TAG)" > /dev/null
	@rm -rf _build/dist
	$(call step,dist,$(BIN)/python book/_tools/installed.py _build/dist)

tag:  ## the tag of this version, which notebooks install, made where it is not yet
	@tag=$$($(PYTHON) book/_tools/release.py) && \
	{ git ls-remote --exit-code --tags origin "$$tag" || \
	git push origin "HEAD:refs/tags/$$tag"; }

# Colab's torch, unless another one is named here or in the environment.
colab:  ## run all chapters as Colab would, the library by pip; or CHAPTERS="12 28"
	@$(PYTHON) book/_tools/colab.py --jobs $(JOBS) \
	  $(if $(filter command environment,$(origin TORCH)),--torch '$(TORCH)') \
	  $(if $(filter-out python3,$(PYTHON)),--python '$(PYTHON)') \
	  $(if $(FRESH),--fresh) $(CHAPTERS)

lock: env  ## bring requirements.lock up to the newest versions
	@echo '$(TORCH)' > $(VENV)/torch.txt
	$(call step,lock,$(BIN)/uv pip compile pyproject.toml --all-extras --upgrade \
	  --no-emit-package torch -c $(VENV)/torch.txt --python-version 3.11 --no-header \
	  --no-emit-find-links --no-emit-index-url -o requirements.lock)

clean:  ## remove everything that was built; the environment stays
	rm -rf _build notebooks/runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

distclean: clean  ## remove the environment too
	rm -rf $(VENV) *.egg-info

help:  ## this list
	@echo "The Literate Transformer"
	@echo
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/\1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done
	@echo
	@echo "Settings: PYTHON=python3.12 (which Python), JOBS=2 (chapters, or test files, at a time),"
	@echo "TRANSFORMER_LIB_SCALE=small or full, TRANSFORMER_LIB_MIRROR=folder with copies of the"
	@echo "corpora (they are fetched where it lacks one, and done without where that fails),"
	@echo "TESTS='-m corpora' (what pytest is to run)."

# --- steps ---------------------------------------------------------------------------

env: $(ENV)

$(ENV): pyproject.toml requirements.lock Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "The book needs Python 3.11 or newer, and \"$(PYTHON)\" is" \
	  "$$($(PYTHON) --version 2>&1). Name another: make book PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "setting up (a minute or more, once)"
	$(call step,environment,sh book/_tools/setup.sh '$(PYTHON)' '$(VENV)' '$(TORCH)' '$(LOCK)')
	@touch $@

library: $(STAMPS)/library

$(STAMPS)/library: $(ENV) $(NOTEBOOKS) book/_tools/export.py
	$(call step,library,$(BIN)/python book/_tools/export.py)
	@mkdir -p $(STAMPS); touch $@

check-sync: env
	$(call step,sync,$(BIN)/python book/_tools/export.py --check)

notebooks: env
	@echo "chapters"
	@$(BIN)/python book/_tools/run_notebooks.py -j $(JOBS)

# The names of the book's files: changes when one comes or goes.
$(STAMPS)/files: FORCE
	@mkdir -p $(STAMPS); printf '%s\n' $(sort $(NOTEBOOKS) $(PAGES) $(LIBRARY)) > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# What the pages load in the browser, served by the book itself, comes from npm: MathJax
# for formulas, Pyodide (Python) for cells that run in the page, ONNX Runtime for the page
# that translates, MiniSearch for the search. Where there is no npm, or it finds nothing,
# formulas come from their usual public address, no cell runs there, nothing is
# translated, and the search is Sphinx's, of whole pages. The browser that
# tests and the PDF fall back on comes with it (book/_tools/browser.py).
MATHJAX := tex-svg.js input/tex/extensions/color.js
PYODIDE := pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json
ONNX    := ort.wasm.bundle.min.mjs ort-wasm-simd-threaded.wasm

$(STAMPS)/web: book/_web/package.json book/_web/package-lock.json Makefile
	@mkdir -p $(STAMPS) _build/web; rm -rf _build/web/static
	@cp book/_web/package.json book/_web/package-lock.json _build/web
	@if command -v npm > /dev/null && npm ci --prefix _build/web --ignore-scripts \
	  --no-audit --no-fund > _build/web/npm.log 2>&1; \
	then cd _build/web && mkdir -p static/mathjax static/pyodide static/onnxruntime static/minisearch && \
	  (cd node_modules/mathjax/es5 && tar cf - $(MATHJAX)) | tar xf - -C static/mathjax && \
	  cp $(addprefix node_modules/pyodide/,$(PYODIDE)) static/pyodide && \
	  cp $(addprefix node_modules/onnxruntime-web/dist/,$(ONNX)) static/onnxruntime && \
	  cp node_modules/minisearch/dist/es/index.js static/minisearch; \
	else echo "nothing from npm: formulas will need the network, and no code runs in the pages, nor the translator"; fi
	@touch $@

$(STAMPS)/html: $(ENV) $(STAMPS)/web $(STAMPS)/files _config.yml _toc.yml $(NOTEBOOKS) $(PAGES) \
                $(LIBRARY) $(wildcard _build/timings.json)
	$(call step,pages,NO_COLOR=1 $(BIN)/jupyter-book build -W -n --keep-going .)
	@touch $@
