# Makefile: `make help` says what there is.  Everything that it makes lies in this folder, in .venv, data, out,
# .pytest_cache and __pycache__, all of them ignored by git.  Only pip, CuPy, matplotlib and PyTorch keep their caches
# where they always do, and the tests keep what they compile for the CPU in the folder for temporary files.  Works with
# GNU make 3.81 and later.

VENV = .venv
RUN  = $(VENV)/bin/python

# The tests start hundreds of processes.  If the environment forbids Python to keep what it compiles, each process
# compiles the scripts again, which takes a twentieth of the time of make check.
unexport PYTHONDONTWRITEBYTECODE

# What model_gpu.py loads: CuPy, and of CUDA's libraries cuBLAS (products), NVRTC (the compiler) and the runtime with its
# headers.  CuPy finds them where pip puts them.
# Several GPUs also need NCCL, which sums gradients between them, and MPI, which starts a process for each: the wheel
# mpi4py, and mpich for a system without an MPI of its own.
# In MB (CuPy 14.2, CUDA 12.9, Linux x86_64): 137 + 581 + 90 + 3; NCCL 352.
GPU_PACKAGES  = "cupy-cuda12x>=14" nvidia-cublas-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12
GPUS_PACKAGES = nvidia-nccl-cu12 mpi4py mpich

.PHONY: all model lint check check-gpu check-peers bench gpu clean help
.NOTPARALLEL:

all: model
	@echo
	@echo "To use the environment in this shell:"
	@echo "    . $(VENV)/bin/activate"

help:
	@echo "make              environment in $(VENV), packages, text, the small model trained in out/small, three samples"
	@echo "make lint         ruff over all Python files; ruff.toml lists its rules"
	@echo "make check        the gradient check beside the tests (2 minutes on 2 cores)"
	@echo "make check-gpu    the GPU engine against the CPU's, where there is an NVIDIA GPU (after make gpu; minutes)"
	@echo "                  HOPPER=0 make check-gpu: on a Hopper, what a GeForce RTX 30 or 40 runs"
	@echo "make check-peers  the tests against PyTorch, transformers, tokenizers, tiktoken (downloads them);"
	@echo "                  it also compiles the kernels for more GPUs"
	@echo "make bench        what this machine can measure of the README's figures; tests/bench.py names the rest"
	@echo "make gpu          CuPy and CUDA's libraries, for an NVIDIA GPU (about 0.8 GB; no CUDA toolkit needed)"
	@echo "make clean        removes $(VENV), caches, encoded texts and unfinished downloads; keeps the models in out/, the texts in data/"
	@echo
	@echo "make PYTHON=/path/to/python3.12   takes that Python, 3.10 or later, for the environment"

# ----------------------------------------------------------------------------------------------------------------------
# The environment.  A stamp file in it says that the packages of one requirements file are installed.

# An environment no longer starts after its Python was removed or upgraded.  Then it is made again.
ifneq ($(shell $(RUN) -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(VENV)/packages
endif

# The first of these that runs and is 3.10 or later: one that is on the PATH may still be a stub that does not run.
$(VENV)/packages: requirements.txt
	@found=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10 python); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: no Python of 3.10 or later was found ($(or $(PYTHON),python3 and others));" \
	         "install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; \
	fi; \
	if ! $$found -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "error: $$found cannot make environments, its modules venv and ensurepip (pip) are missing;" \
	         "on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; \
	fi; \
	echo "Making $(VENV) with $$($$found --version)."; \
	$$found -m venv --clear $(VENV)
	@$(call install,-r requirements.txt)
	@touch $@

$(VENV)/packages-tests: $(VENV)/packages tests/requirements.txt
	@echo "Installing what the tests need (about 160 MB)."
	@$(call install,-r tests/requirements.txt)
	@touch $@

$(VENV)/packages-peers: $(VENV)/packages tests/peers/requirements.txt
	@echo "Installing PyTorch and the other peers (some hundred MB; with CUDA, as on Linux, some GB)."
	@$(call install,-r tests/peers/requirements.txt)
	@touch $@

install = $(RUN) -m pip install --quiet --disable-pip-version-check $(1) || { \
	echo "error: pip could not install the packages (see above); is there a network, and room on the disk?" >&2; exit 2; }

# ----------------------------------------------------------------------------------------------------------------------
# The model.  An interrupted run is continued.  A finished one is only measured again.

model: $(VENV)/packages
	@if [ -f out/small/config.json ]; then \
	    $(RUN) train.py small --resume; \
	else \
	    FETCH_TIMEOUT=10 ./fetch_data.sh tiny \
	        || echo "Going on without it: the model learns from the English that ships inside Python."; \
	    $(RUN) train.py small; \
	fi

# ----------------------------------------------------------------------------------------------------------------------
# The proofs.  The temporary files of ruff and pytest stay in this folder, too.

lint: $(VENV)/packages-tests
	$(VENV)/bin/ruff check

# The gradient check takes one core for a quarter of a minute.  It begins first and runs beside the tests; its table is
# printed when both are done.
check: $(VENV)/packages-tests
	@mkdir -p .pytest_cache
	@echo "The gradient check runs beside the tests; its table comes at the end."; \
	$(RUN) gradcheck.py >.pytest_cache/gradcheck.txt 2>&1 & gradcheck=$$!; \
	trap "kill $$gradcheck" INT TERM HUP; \
	$(RUN) -m pytest -q -m "not slow" -n auto --maxprocesses 4 --dist worksteal --ignore=tests/peers \
	    --basetemp=.pytest_cache/tmp tests; tests=$$?; \
	wait $$gradcheck; gradients=$$?; \
	cat .pytest_cache/gradcheck.txt; \
	exit $$((tests + gradients))

check-gpu: $(VENV)/packages-tests
	$(RUN) gradcheck.py --gpu
	@mkdir -p .pytest_cache
	$(RUN) -m pytest -q -s --basetemp=.pytest_cache/tmp-gpu tests/test_on_gpu.py

check-peers: $(VENV)/packages-tests $(VENV)/packages-peers
	@mkdir -p .pytest_cache
	$(RUN) -m pytest -q --basetemp=.pytest_cache/tmp-peers tests/peers
	$(RUN) -m pytest -q --basetemp=.pytest_cache/tmp-peers -m slow tests/test_flash.py tests/test_kernels.py

bench: $(VENV)/packages
	$(RUN) tests/bench.py

# ----------------------------------------------------------------------------------------------------------------------
# A GPU

gpu: $(VENV)/packages
	@if ! gpus=$$(nvidia-smi -L 2>/dev/null); then \
	    echo "error: no NVIDIA GPU with its driver was found (nvidia-smi -L fails), so nothing was installed" >&2; \
	    exit 2; \
	fi; \
	echo "$$gpus"; \
	if [ $$(echo "$$gpus" | wc -l) -gt 1 ]; then \
	    echo "Downloading CuPy, cuBLAS, NVRTC, the CUDA runtime, NCCL and MPI: about 1.2 GB, less what pip has cached."; \
	    several="$(GPUS_PACKAGES)"; \
	else \
	    several=; \
	    echo "Downloading CuPy, cuBLAS, NVRTC and the CUDA runtime: about 0.8 GB, less what pip has cached."; \
	fi; \
	$(call install,$(GPU_PACKAGES) $$several)
	@$(RUN) -c 'import cupy; print("CuPy", cupy.__version__, "computes:", cupy.arange(4).sum())'

# ----------------------------------------------------------------------------------------------------------------------
clean:
	rm -rf $(VENV) .pytest_cache __pycache__ tests/__pycache__ tests/peers/__pycache__
	rm -f data/*.bin data/plain-*.txt data/*.new data/*.part data/books/*.part data/books/*.new out/smollm2/*.part
	rm -rf data/fetch.lock
	@echo "Kept: the texts in data/ and the models in out/ (delete them by hand)."
