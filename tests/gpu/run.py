"""`make gpu-test`: runs the tests that need a GPU, with the wheel in dist/ if there is one.

First come the Rust tests in dist/gpu (`make gpu-binaries`), which drive the CUDA backend without JAX, also under
compute-sanitizer's memcheck, and a call of every tuned kernel under its synccheck and initcheck. A table shows their
errors against the reference. Then come the Python tests marked `gpu`. Missing parts are skipped with a message.
Arguments go to pytest.
"""

import itertools
import pathlib
import shutil
import subprocess
import sys
import tempfile

from package import GPU_TESTS, ROOT, environment, selected
from summary import table

# Fewer random cases under compute-sanitizer, which is slow.
FEWER = {"XLA_ATTENTION_TEST_CASES": "8", "XLA_ATTENTION_FUZZ_CALLS": "200"}

# Tests of a topic that call each tuned kernel once and take seconds. docs/dev/tests.md says why racecheck is not among
# the tools.
EACH_KERNEL = {
    "tuned_prefill": (
        "tuned_kernels_are_chosen",
        "long_sequences_without_a_mask",
        "the_fused_kernel_is_chosen",
        "many_fused_decode_sequences",
    ),
    "tuned_decode": ("cluster_decode_is_chosen",),
    "tuned_backward": ("tuned_backward_kernels_are_chosen",),
    "tuned_split_kv": ("the_kernel_is_chosen",),
    "many_partials": ("the_kernel_is_chosen",),
    "warp_tiles": ("new_tokens_are_stored_and_attended_to",),
    "bias": ("tuned_kernels_with_a_bias_are_chosen", "few_queries_are_decoded"),
}


def main() -> int:
    """Run everything; returns the number of parts that failed."""
    env = environment()
    failed = []

    def part(name: str, *command: str, **variables: str) -> None:
        print(f"== {name}", flush=True)
        if subprocess.run(command, env={**env, **variables}, cwd=ROOT).returncode:
            failed.append(name)

    part("info", sys.executable, "-m", "xla_attention", "info")
    measured = pathlib.Path(tempfile.mkdtemp(prefix="xla_attention_")) / "summary.tsv"
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on PATH: memcheck, synccheck and initcheck skipped")
    for binary, topics in GPU_TESTS.items():
        program = ROOT / "dist/gpu" / binary
        if not program.is_file():
            print(f"{program} is not there (`make gpu-binaries`): skipped")
            continue
        for topic in topics:
            run = (str(program), "--quiet", *selected(topic, topics))
            part(topic, *run, XLA_ATTENTION_TEST_DEVICE="cuda", XLA_ATTENTION_TEST_SUMMARY=str(measured))
            if not sanitizer:
                continue
            under = (sanitizer, "--error-exitcode", "7", "--tool")
            part(f"memcheck {topic}", *under, "memcheck", *run, XLA_ATTENTION_TEST_DEVICE="cuda", **FEWER)
            for test, tool in itertools.product(EACH_KERNEL.get(topic, ()), ("synccheck", "initcheck")):
                check = (*under, tool, str(program), "--quiet", test)
                part(f"{tool} {test}", *check, XLA_ATTENTION_TEST_DEVICE="cuda")
    print(table(measured), flush=True)
    part("pytest", sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *sys.argv[1:])
    print("failed: " + ", ".join(failed) if failed else "all parts passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
