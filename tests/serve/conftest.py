"""The tiny model and a server of it."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "examples")]
# The tiny model's steps need not be fast: XLA:CPU compiles without optimisation.
if not os.path.exists("/dev/nvidia0"):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".lstrip()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The tiny model as a file."""
    from tiny_llama import gguf_tensors, write_gguf

    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", gguf_tensors())


@pytest.fixture(scope="session")
def tokenizer(model):
    """Its tokenizer."""
    from llama.gguf_file import GgufModel
    from llama.tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(GgufModel(model))


@pytest.fixture(scope="session")
def server(model):
    """A server for all tests that leave it as it was."""
    from running import Running

    # Steps launched together are the default on a GPU.
    running = Running(model, "--steps-per-launch", "2")
    yield running
    running.stop()
