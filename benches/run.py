"""`make bench`: benchmarks against the installed libraries on this GPU, with the wheel in dist/ if there is one.

`make bench ARGS=ragged` runs the cases of benches/decode.py whose name contains the word,
`make bench ARGS="prefill.py d128"` those of another program. Needs torch, for peers and CUDA graphs.
"""

import importlib.util
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/gpu"))


def main() -> int:
    """Run a benchmark in a subprocess in which the package can be imported."""
    from package import environment

    if importlib.util.find_spec("torch") is None:
        sys.exit("benches need torch with CUDA")
    arguments = sys.argv[1:]
    program = arguments.pop(0).removesuffix(".py") if arguments[:1] and arguments[0].endswith(".py") else "decode"
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {program}; {program}.main(*sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
