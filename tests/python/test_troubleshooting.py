"""Every error of docs/troubleshooting.md has the text that the page quotes."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export

from subprocesses import python
from xla_attention import _library
from xla_attention.jax import dot_product_attention, flash_attn_varlen, paged_attention

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)

DENSE, PACKED = jnp.ones((2, 16, 4, 64)), jnp.ones((12, 4, 64))
PAGES = jnp.zeros((4, 16, 4, 64))
TABLES = jnp.array([[0], [1]])


def paged(query=PACKED[:3], tables=TABLES):
    """Two sequences of 4 and 10 keys."""
    lens, starts, cache = jnp.array([4, 10]), jnp.array([0, 1, 3]), jnp.zeros((4, 16, 8, 64))
    return paged_attention(query, cache, lens, tables, starts, jnp.array([2]), scale=0.1)


def varlen(q, k=None, **options):
    k = q if k is None else k
    return flash_attn_varlen(q, k, k, jnp.array([0, 5, 12]), **options).sum()


def program(code, **environment):
    """A call that runs a program and raises what this writes to standard error."""

    def run():
        raise RuntimeError(python("-c", code, check=False, JAX_PLATFORMS="cpu", **environment).stderr)

    return run


def step(*command, **environment):
    """A call that runs a step of `make` and raises what this writes to standard error."""

    def run():
        raise RuntimeError(subprocess.run(command, env=environment, capture_output=True, text=True).stderr)

    return run


def add_on_cuda():
    vector = ((3,), "float32")
    request = _library.Request("xla_gpu_simple_add", [vector, vector], [vector], {})
    request.set_addresses((64, 128), (192,))  # not accessed: loading a kernel comes first
    request.run(_library.Action.PREPARE_CUDA)


UNREGISTERED = """
import jax, jax.numpy as jnp
result = jax.ShapeDtypeStruct((4,), jnp.float32)
jax.ffi.ffi_call("xla_gpu_simple_add", result)(jnp.ones(4), jnp.ones(4))
"""
WRONG_PAGE = """
import jax.numpy as jnp
from xla_attention.jax import paged_attention
lens, starts = jnp.array([4, 10]), jnp.array([0, 1, 3])
cache, tables = jnp.zeros((4, 16, 8, 64)), jnp.array([[0], [9]])
paged_attention(jnp.ones((3, 4, 64)), cache, lens, tables, starts, jnp.array([2]), scale=0.1).block_until_ready()
"""

# By the beginning of the quoted text.
CAUSES = {
    "make: cargo is missing": step("/bin/sh", ROOT / "build_support/prepare.sh", "/missing", PATH="/missing"),
    # Nothing listens on port 9.
    "make: pip failed": step(
        *[sys.executable, ROOT / "build_support/pip_install.py", "--retries=1", "missing"],
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
    ),
    "xla_attention.jax needs jax": program("import sys; sys.modules['jax'] = None; import xla_attention.jax"),
    "xla_attention: the shared library": program("import xla_attention.jax", XLA_ATTENTION_LIBRARY="/missing.so"),
    "No FFI handler registered": program(UNREGISTERED),
    "no NVIDIA driver": add_on_cuda,
    "… has shape": lambda: paged(tables=jnp.zeros((3, 1), int)),
    "… has head dimension 60": lambda: varlen(PACKED[..., :60]),
    "… q is bf16": lambda: varlen(PACKED.astype(jnp.bfloat16), PACKED),
    "dot_product_attention: there is no dropout": lambda: dot_product_attention(DENSE, DENSE, DENSE, dropout_rate=0.1),
    "paged_attention: there is no gradient": lambda: jax.grad(lambda q: paged(q).sum())(PACKED[:3]),
    "flash_attn_varlen: there is no gradient": lambda: jax.grad(
        lambda q: varlen(q, PAGES, block_table=TABLES, seqused_k=jnp.array([3, 4]))
    )(PACKED),
    "can't apply forward-mode": lambda: jax.jvp(varlen, (PACKED,), (PACKED,)),
    "Cannot serialize code": lambda: export.export(jax.jit(paged))(PACKED[:3]),
    "XLA_ATTENTION_CHECK: block_tables[1, 0]": program(WRONG_PAGE, XLA_ATTENTION_CHECK="1"),
}
# The source of the texts that only a GPU or a build causes.
OTHERS = {
    "the kernel … is not in this library": "src/cuda/module_image.rs",
    "the GPU is sm_…": "src/cuda/device.rs",
    "no nvcc in": "build_support/kernels.rs",
    "drivers of CUDA 12 will": "build_support/kernels.rs",
}


def quoted(beginning):
    (text,) = (text for text in TEXTS if text.startswith(beginning))
    return text


def pattern(text, varying):
    return re.escape(text).replace("…", varying)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_error_has_the_text_of_the_page(cause):
    if cause == "no NVIDIA driver" and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a driver")
    with pytest.raises(Exception) as raised:  # noqa: PT011 (the text is compared)
        CAUSES[cause]()
    assert re.search(pattern(quoted(cause), ".*"), str(raised.value)), str(raised.value)[-2000:]


@pytest.mark.parametrize(("beginning", "source"), OTHERS.items())
def test_the_source_has_the_text_of_the_page(beginning, source):
    assert re.search(pattern(quoted(beginning), r"\{.*?\}"), (ROOT / source).read_text())


def test_every_text_of_the_page_has_a_cause():
    assert len(TEXTS) == len(CAUSES) + len(OTHERS)
