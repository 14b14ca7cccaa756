# Everything on a CPU machine: `make demo`, `make test`, `make lint`. The environment is made once, in .venv.
PYTHON ?= python3.11
VENV := .venv
VENV_TORCH29 := .venv-torch29
VENV_NXDI := .venv-nxdi
VENV_VLLM := .venv-vllm
SERVED := build/serving
NXDI := neuronx-distributed neuronx-distributed-inference
PYTEST_OPTIONS := -rs -n 2

# One thread per process: the shapes are tiny, and two test processes share two cores.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: venv demo test test-torch29 test-nxdi test-vllm serve-demo faults bench lint clean

venv: $(VENV)/.installed

# torch stands first, alone: whatever is installed after it finds it there and pulls no other build.
$(VENV)/.installed: requirements/torch.txt $(wildcard requirements/*.txt) setup.py pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -r requirements/torch.txt
	$(VENV)/bin/python -m pip install --quiet -r requirements/dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

demo: venv
	$(VENV)/bin/python -m tests.demo

test: venv
	$(VENV)/bin/python -m pytest $(PYTEST_OPTIONS)

# Breaks copies of the package in many ways and shows that the tests notice each; takes some minutes.
faults: venv
	$(VENV)/bin/python -m tests.fault_injection

# Speed at the 0.8B shape, random weights, against transformers and, with VLLM_PYTHON=FILE, vLLM's CPU build; about half
# an hour on an otherwise idle machine, the first time twenty minutes of that compiling.
bench: venv
	mkdir -p build/bench
	test -e build/bench/model || $(VENV)/bin/python -m tests.random_checkpoint build/bench/model
	$(VENV)/bin/nxdi-qwen-benchmark speed --model build/bench/model --work build/bench/work \
		--json build/bench/speed.json --plot build/bench/speed.png $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

# The oldest torch that is supported. Where its wheel cannot be installed, that is said and is no failure.
test-torch29:
	@if test -e $(VENV_TORCH29)/.installed || $(MAKE) --no-print-directory $(VENV_TORCH29)/.torch; then \
		$(MAKE) --no-print-directory $(VENV_TORCH29)/.installed && \
		$(VENV_TORCH29)/bin/python -m pytest $(PYTEST_OPTIONS); \
	else \
		echo "test-torch29: skipped, `cat requirements/torch-2.9.txt` cannot be installed here (pip's message is above)"; \
	fi

$(VENV_TORCH29)/.torch: requirements/torch-2.9.txt
	test -x $(VENV_TORCH29)/bin/python || $(PYTHON) -m venv $(VENV_TORCH29)
	$(VENV_TORCH29)/bin/python -m pip install --quiet -r requirements/torch-2.9.txt
	touch $@

$(VENV_TORCH29)/.installed: $(VENV_TORCH29)/.torch $(wildcard requirements/*.txt) setup.py pyproject.toml
	$(VENV_TORCH29)/bin/python -m pip install --quiet -r requirements/dev.txt
	$(VENV_TORCH29)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

# Against the real NxDI, without the Neuron SDK: `make test-nxdi SOURCES=DIR`, where DIR holds checkouts of its two
# public repositories. They are used as they are, by a path file.
test-nxdi:
	@for name in $(NXDI); do test -d "$(SOURCES)/$$name/src" || { \
		echo "make test-nxdi SOURCES=DIR: DIR/$$name is no checkout of aws-neuron/$$name" >&2; exit 2; }; done
	$(MAKE) --no-print-directory $(VENV_NXDI)/.installed
	for name in $(NXDI); do echo "$(abspath $(SOURCES))/$$name/src"; done > `$(VENV_NXDI)/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))'`/nxdi.pth
	$(VENV_NXDI)/bin/python -m pytest $(PYTEST_OPTIONS) tests/nxdi

$(VENV_NXDI)/.installed: requirements/torch-2.9.txt requirements/nxdi.txt setup.py pyproject.toml
	test -x $(VENV_NXDI)/bin/python || $(PYTHON) -m venv $(VENV_NXDI)
	$(VENV_NXDI)/bin/python -m pip install --quiet -r requirements/torch-2.9.txt
	$(VENV_NXDI)/bin/python -m pip install --quiet -r requirements/nxdi.txt
	$(VENV_NXDI)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

# With the real vLLM on the CPU, over HTTP. What Hugging Face computes comes from the other environment: vLLM needs an
# older transformers.
test-vllm: $(VENV_VLLM)/.installed $(SERVED)/.artifacts
	$(VENV_VLLM)/bin/python -m pytest $(PYTEST_OPTIONS) tests/serving

serve-demo: $(VENV_VLLM)/.installed $(SERVED)/.artifacts
	@$(VENV_VLLM)/bin/python -m tests.serve_demo

# Without dependencies: requirements/vllm.txt says why.
$(VENV_VLLM)/.installed: requirements/torch.txt requirements/vllm.txt setup.py pyproject.toml
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet -r requirements/torch.txt
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps -r requirements/vllm.txt
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

$(SERVED)/.references: $(VENV)/.installed $(addprefix tests/, hf_fixtures.py byte_tokenizer.py nxdi/references.py \
		serving/references.py serving/stored.py)
	$(VENV)/bin/python -m tests.serving.references
	touch $@

$(SERVED)/.artifacts: $(SERVED)/.references tests/serving/artifacts.py $(shell find compile modeling -name '*.py')
	$(VENV)/bin/python -m tests.serving.artifacts
	touch $@

# The same model behind the NxDI-based vLLM plugin, without Neuron hardware: `make test-vllm-neuron SOURCES=DIR
# VLLM_NEURON_PYTHON=FILE`. DIR holds checkouts of NxD, NxDI and vllm-neuron, FILE is the Python of an environment that
# docs/serving-neuron.md describes; the sources and this package are put into it by path.
.PHONY: test-vllm-neuron
test-vllm-neuron:
	@for file in $(addsuffix /src,$(NXDI)) vllm-neuron/vllm_neuron; do test -d "$(SOURCES)/$$file" || { \
		echo "make test-vllm-neuron SOURCES=DIR: there is no $(SOURCES)/$$file" >&2; exit 2; }; done
	@test -x "$(VLLM_NEURON_PYTHON)" || { \
		echo "make test-vllm-neuron VLLM_NEURON_PYTHON=FILE: no Python; docs/serving-neuron.md makes one" >&2; exit 2; }
	$(MAKE) --no-print-directory $(SERVED)/.references
	for name in $(NXDI); do echo "$(abspath $(SOURCES))/$$name/src"; done > `$(VLLM_NEURON_PYTHON) -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))'`/nxdi.pth
	$(VLLM_NEURON_PYTHON) -m pip install --quiet --no-build-isolation --no-deps -e "$(SOURCES)/vllm-neuron" -e .
	$(VLLM_NEURON_PYTHON) -m pytest -rs tests/serving/neuron

# The folders carry other names than the package: links give mypy the import names.
lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	mkdir -p build/typing/nxdi_qwen
	for folder in modeling compile parity serving scripts; do ln -sfn ../../../$$folder build/typing/nxdi_qwen/$$folder; done
	$(VENV)/bin/mypy -p nxdi_qwen

clean:
	rm -rf $(VENV) $(VENV_TORCH29) $(VENV_NXDI) $(VENV_VLLM) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
