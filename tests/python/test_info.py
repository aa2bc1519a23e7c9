"""info(), logging, and imports of the package."""

import json
import re

import xla_attention
from subprocesses import python, python_with_torch
from xla_attention import _library
from xla_attention.jax import _register


def test_info_names_versions_targets_variants_and_front_ends():
    text = xla_attention.info()
    assert text.startswith(f"xla-attention {xla_attention.__version__}, ")
    assert ", handlers of XLA FFI 0.1 and 0.5\n" in text
    assert ("\nfor tests only: " in text) == _library.build_info()["failpoints"]
    for target in ("xla_gpu_simple_add", "XlaGpuSimpleAdd", "xla_gpu_paged_attention", "xla_gpu_kv_cache_update_split"):
        assert f"  {target} (cpu" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  jax: ready, jax "))
    theirs = ".".join(map(str, _register.runtime_ffi_version()))
    assert f"; handlers of XLA FFI {_register.accepted()} (the runtime has {theirs})" in line


def test_info_is_printed_by_the_module():
    # It imports every front-end, torch too.
    assert python_with_torch("-m", "xla_attention", "info").stdout.startswith("xla-attention ")


def test_importing_the_package_imports_no_framework():
    done = python("-c", "import sys, xla_attention; print(sorted({'jax', 'torch'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"


def test_every_variant_reports_registers_and_spills():
    build = _library.build_info()
    assert build["version"] == xla_attention.__version__
    for variant in build["variants"]:
        for arch, (registers, spill_bytes, _) in variant["sass"].items():
            assert 0 < registers <= 255, (variant["name"], arch)
            assert spill_bytes == 0, (variant["name"], arch)


def test_a_missing_library_says_what_to_do():
    code = "import xla_attention._library as l; l.library()"
    done = python("-c", code, check=False, XLA_ATTENTION_LIBRARY="/nowhere/lib.so")
    assert "ImportError: xla_attention: the shared library /nowhere/lib.so is not there" in done.stderr


def test_the_log_reports_the_selected_kernel_once_per_shape():
    code = """
import jax.numpy as jnp
from xla_attention.jax import paged_attention, simple_add
one, table, starts = jnp.array([1]), jnp.array([[1]]), jnp.array([0, 1])
for _ in range(3):
    simple_add(jnp.ones(5), jnp.ones(5))
    paged_attention(jnp.ones((1, 2, 64)), jnp.ones((2, 4, 2, 64)), one, table, starts, one, scale=1.0)
"""
    done = python("-c", code, XLA_ATTENTION_LOG="debug", JAX_PLATFORMS="cpu")
    assert done.stderr.count(" attention: ") == 1, done.stderr
    assert done.stderr.count("xla_gpu_simple_add: on the CPU: a f32[5], b f32[5] to out f32[5]\n") == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "xla_gpu_paged_attention: on the CPU: " in line]
    assert len(lines) == 1, done.stderr
    assert ": query f32[1, 2, 64], kv_cache f32[2, 4, 2, 64], " in lines[0], lines
    assert re.search(r" to out f32\[1, 2, 64\].*, workspace of \d+ bytes$", lines[0]), lines
    assert "paged_attention: " not in python("-c", code, JAX_PLATFORMS="cpu").stderr


def test_an_unknown_log_level_names_the_known_ones():
    done = python("-c", "import xla_attention._library as l; l.targets()", XLA_ATTENTION_LOG="loud")
    assert "XLA_ATTENTION_LOG=loud: expected off, error, warn, info, debug or trace" in done.stderr


def test_build_info_is_json_with_the_versions_of_the_headers():
    info = json.loads(_library.library().xa_info())
    assert (info["xla_ffi"], info["handler_sets"]) == ([0, 1], [[0, 1], [0, 5]])
