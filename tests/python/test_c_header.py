"""A C and a C++ program that include `xla_attention.h` and link the library."""

import pathlib
import shutil
import subprocess

import pytest

from xla_attention import include_dir, library_path

PROGRAM = pathlib.Path(__file__).with_name("c_interface.c")
EXPECTED_OUTPUT = """11 22 33
3 xla_gpu_simple_add: b has shape [2], expected the shape of a, [3]
0 0 0
xla_gpu_simple_add on cpu
"""


@pytest.mark.parametrize("language", [("gcc", "-std=c11", "c"), ("g++", "-std=c++17", "c++")], ids=["c", "c++"])
def test_a_program_includes_the_header_and_links_the_library(language, tmp_path):
    compiler, standard, name = language
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    library, binary = library_path().resolve(), tmp_path / "program"
    strict = [standard, "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{include_dir()}"]
    link = [f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, *strict, "-x", name, PROGRAM, "-x", "none", *link, "-o", binary], check=True)
    assert subprocess.run([binary], capture_output=True, text=True, check=True).stdout == EXPECTED_OUTPUT
