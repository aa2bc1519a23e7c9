"""`python3 tests/gpu/sanitizer/run.py`: what compute-sanitizer reports for small programs with mbarriers.

docs/dev/tests.md cites the table. Needs nvcc and compute-sanitizer on PATH, and a GPU of sm_90.
"""

import concurrent.futures
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

# (program, macros, tool and its options)
RUNS = [("warp_barriers", {"WARPS": w}, tool) for w in (1, 12) for tool in ("synccheck", "racecheck")]
RUNS += [
    ("overwritten_barrier", word, tool)
    for word in ({}, {"WORD": "0ull"}, {"WORD": "0x3f000000bf2a5b37ull"}, {"WORD": "0xbf000000bf2a5b37ull"})
    for tool in ("", "synccheck")
]
RUNS += [
    (
        "plan_pipeline",
        {"WRITER": writer, "FULL": full, "EMPTY": empty, "READERS": readers, "SYNC": sync},
        "racecheck",
    )
    for writer, full, empty, readers in (
        (0, 1, 1, 1),
        (0, 1, 1, 32),
        (0, 1, 32, 32),
        (5, 1, 1, 1),
        (5, 32, 1, 1),
        (5, 1, 32, 1),
        (5, 1, 1, 32),
        (5, 32, 32, 32),
    )
    for sync in (0, 1)
]


def build(folder: pathlib.Path, name: str, macros: dict[str, object]) -> pathlib.Path:
    """Compile a program with these macros."""
    binary = folder / "_".join([name, *(str(value) for value in macros.values())])
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc is not on PATH")
    defines = [f"-D{macro}={value}" for macro, value in macros.items()]
    # nvcc of the PyPI wheels does not search their library folder.
    library = pathlib.Path(nvcc).resolve().parents[1] / "lib"
    options = ["-arch=sm_90a", "-std=c++17", "-lineinfo", f"-L{library}", *defines]
    subprocess.run([nvcc, *options, "-o", str(binary), str(HERE / f"{name}.cu")], check=True)
    return binary


def run(tool: str, binary: pathlib.Path) -> tuple[str, str]:
    """The exit status, and the lines of output with results or errors."""
    command = ["compute-sanitizer", "--tool", *tool.split(), "--error-exitcode", "7"] if tool else []
    try:
        completed = subprocess.run([*command, str(binary)], capture_output=True, text=True, timeout=60)
        output, code = completed.stdout + completed.stderr, str(completed.returncode)
    except subprocess.TimeoutExpired as expired:
        output, code = (expired.stdout or b"").decode(), "hangs"
    lines = [line.removeprefix("=========").strip() for line in output.splitlines()]
    prefixes = ("results:", "failed:", "Warning", "Error", "Barrier", "Race", "RACECHECK", "ERROR SUMMARY")
    return code, "; ".join(list(dict.fromkeys(line for line in lines if line.startswith(prefixes)))[:5])[:400]


def main() -> None:
    """Build and run everything; prints a row per run."""
    folder = pathlib.Path(tempfile.mkdtemp())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {(name, str(macros)): pool.submit(build, folder, name, macros) for name, macros, _ in RUNS}
    print("| program | tool | exit | what it prints |\n|---|---|---|---|", flush=True)
    for name, macros, tool in RUNS:
        code, output = run(tool, programs[name, str(macros)].result())
        values = " ".join(f"{macro}={value}" for macro, value in macros.items())
        print(f"| {name} {values} | {tool or 'none'} | {code} | {output} |", flush=True)


if __name__ == "__main__":
    main()
