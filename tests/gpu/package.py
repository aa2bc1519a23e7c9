"""The test binaries for GPU machines, and the package under test: installed, or unpacked from the wheel in dist/."""

import glob
import importlib.util
import itertools
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

# Test binaries of the crate that run on the GPU with XLA_ATTENTION_TEST_DEVICE=cuda, and their topics: modules that run
# separately.
GPU_TESTS = {
    "it": (
        "cuda_graphs",
        "cuda_alignment",
        "simple_add",
        "rust_operators",
        "kv_cache_update",
        "kv_cache_update_fp8",
        "rope_kv_cache_update",
        "merge_attention_states",
        "gather_kv_cache",
        "conformance",
        "attention_options",
        "paged_attention",
        "paged_attention_update",
        "mla_paged_attention",
        "mla_paged_attention_update",
        "key_ranges",
        "tree_masks",
        "quantized_cache",
        "bias",
        "flash_attn_varlen",
        "flash_attn_varlen_bwd",
        "tuned_prefill",
        "tuned_decode",
        "tuned_split_kv",
        "tuned_backward",
        "fp8_accuracy",
    ),
    "subprocess": ("cuda_contexts", "cuda_kernel_files", "check_mode", "failpoints"),
    "fuzz": ("mutated_calls", "runner"),
}


def selected(topic: str, topics: tuple[str, ...]) -> list[str]:
    """The arguments of a test binary for one topic. A filter matches anywhere, so that longer names are skipped."""
    longer = (other for other in topics if other != topic and other.endswith(topic))
    return [f"{topic}::", *itertools.chain.from_iterable(("--skip", f"{other}::") for other in longer)]


ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Environment variables with which `import xla_attention` works, without network or Rust."""
    # `make release` leaves wheels for other processors too.
    wheels = sorted(glob.glob(str(ROOT / f"dist/*_{platform.machine()}.whl")), key=os.path.getmtime)
    if not wheels:
        if importlib.util.find_spec("xla_attention") is None:
            sys.exit("no wheel in dist/ and xla_attention is not installed: run `make wheel`, or copy a wheel here")
        return dict(os.environ)
    folder = tempfile.mkdtemp(prefix="xla_attention_")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", folder, wheels[-1]], check=True)
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
