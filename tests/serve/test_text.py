"""Text from tokens as they arrive."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "examples")]

import pytest  # noqa: E402

from llama.gguf_file import GgufModel  # noqa: E402
from llama.tokenizer import tokenizer_from_gguf  # noqa: E402
from serve.text import TextStream  # noqa: E402
from tiny_llama import gguf_tensors, write_gguf  # noqa: E402

TEXT = "hello é 😀 wo 漢字 12"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_from_gguf(GgufModel(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", gguf_tensors())))


def parts(tokenizer, text, stops=()):
    stream = TextStream(tokenizer, stops)
    return [*(stream.push(token) for token in tokenizer.encode(text)), stream.finish()], stream.stopped


def test_no_part_holds_half_a_character(tokenizer):
    got, stopped = parts(tokenizer, TEXT)
    assert "".join(got) == TEXT and not stopped
    assert not any("\ufffd" in part for part in got)


@pytest.mark.parametrize("stops", [(), ("漢字 1",)])
@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_tokens_that_come_together_give_the_same_text(tokenizer, size, stops):
    tokens, stream = tokenizer.encode(TEXT * 3), TextStream(tokenizer, stops)
    got = [stream.push_all(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert "".join([*got, stream.finish()]) == (TEXT[: TEXT.index(stops[0])] if stops else TEXT * 3)
    assert not any("\ufffd" in part for part in got)


def test_bytes_that_never_form_a_character_come_out(tokenizer):
    tokens = tokenizer.encode("😀")[:2] + tokenizer.encode("12")
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens)


@pytest.mark.parametrize("stop", ["😀", "o é", "lo", "12", "h"])
def test_nothing_of_a_stop_string_comes_out(tokenizer, stop):
    got, stopped = parts(tokenizer, TEXT, ["zzz", stop])
    assert "".join(got) == TEXT[: TEXT.index(stop)] and stopped


def test_the_beginning_of_a_stop_string_comes_out_at_the_end(tokenizer):
    got, stopped = parts(tokenizer, TEXT, ["123"])
    assert "".join(got) == TEXT and not stopped
