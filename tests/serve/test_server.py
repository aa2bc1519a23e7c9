"""The server in a separate process, asked by the openai package, and by plain sockets for what that cannot say."""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "examples")]
openai = pytest.importorskip("openai")

from tiny_llama import CONTEXT, expected_tokens, gguf_tensors, write_gguf  # noqa: E402

PROMPTS = ["hello wo 12", "the", "a longer prompt, of several pages: hello hello 1 2", "x"]
STARTED = re.compile(r"serving tiny at (http://127\.0\.0\.1:(\d+))")


class Running:
    """A started server."""

    def __init__(self, model: Path, *options: str, **environment: str) -> None:
        sizes = ["--max-num-seqs", "4", "--token-budget", "16", "--page-size", "4", "--pages", "128"]
        command = [sys.executable, ROOT / "examples/server.py", "--model", model, "--port", "0", "--platform", "cpu"]
        self.process = subprocess.Popen(
            [*command, *sizes, *options], stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        match = STARTED.match(self.process.stdout.readline())
        if not match:
            self.process.kill()
            self.wait()
            pytest.fail("the server did not start")
        self.url, self.port = match[1], int(match[2])
        options = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 60}
        key = environment.get("XLA_ATTENTION_API_KEY", "none")
        self.client = openai.OpenAI(api_key=key, **options)
        self.async_client = lambda: openai.AsyncOpenAI(api_key=key, **options)

    def complete(self, prompt: str, max_tokens: int = 12, **options):
        return self.client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, **options)

    def send(self, body: bytes, content_type: str = "application/json", method: str = "POST", path="/v1/completions"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, text

    def gauge(self, name: str) -> float:
        text = self.send(b"", method="GET", path="/metrics")[1].decode()
        return float(re.search(rf"^xla_attention_{name} (\S+)$", text, re.M)[1])

    def wait_idle(self) -> None:
        end = time.monotonic() + 10
        while self.gauge("requests_running") or self.gauge("requests_waiting") or self.gauge("kv_cache_usage"):
            assert time.monotonic() < end, "pages or sequences are left"
            time.sleep(0.05)

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        self.process.stdout.close()
        return self.process.wait(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", gguf_tensors())


@pytest.fixture(scope="module")
def server(model):
    running = Running(model)
    yield running
    running.stop()


@pytest.fixture
def tokenizer(model):
    from llama.gguf_file import GgufModel
    from llama.tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(GgufModel(model))


def oracle(tokenizer, prompt: str, max_tokens: int) -> str:
    """What NumPy alone generates."""
    tokens = []
    for token in expected_tokens(tuple(tokenizer.encode(prompt)), max_tokens):
        if token in tokenizer.stop_tokens:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def test_models_and_health(server):
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.send(b"", method="GET", path="/health")[0] == 200


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_the_oracles_streamed_or_not(server, tokenizer, prompt):
    whole = server.complete(prompt)
    assert whole.choices[0].text == oracle(tokenizer, prompt, 12)
    assert whole.usage.prompt_tokens == len(tokenizer.encode(prompt))
    chunks = list(server.complete(prompt, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_chat_streamed_or_not_is_the_completion_of_the_template(server):
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": "12"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 10}
    whole = server.client.chat.completions.create(**options)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert whole.choices[0].message.content == server.complete(turns, 10).choices[0].text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(server.client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content


def test_several_prompts_and_choices(server, tokenizer):
    answer = server.client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=6, n=2)
    expected = [oracle(tokenizer, prompt, 6) for prompt in PROMPTS for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected


def test_a_stop_string_ends_the_text_before_it(server):
    text = server.complete("hello", 16).choices[0].text
    stop = text[5:8]
    for stream in (False, True):
        answer = server.complete("hello", 16, stop=["never found", stop], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"
    server.wait_idle()


def test_many_asynchronous_clients_get_what_each_gets_alone(server, tokenizer):
    prompts = [PROMPTS[i % 4] + "hello"[: i % 5] for i in range(64)]

    async def ask():
        async with server.async_client() as client:
            calls = [client.completions.create(model="tiny", prompt=p, max_tokens=2 + len(p) % 7) for p in prompts]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    expected = [oracle(tokenizer, p, 2 + len(p) % 7) for p in prompts]
    assert [answer.choices[0].text for answer in answers] == expected
    server.wait_idle()


def test_cut_off_requests_leave_no_page_behind(server):
    async def cut_off():
        async with server.async_client() as client:
            calls = [
                client.completions.create(
                    model="tiny", prompt=f"{i}", max_tokens=120, timeout=0.05, stream=i % 2 == 0, n=2
                )
                for i in range(100)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(cut_off())
    assert sum(isinstance(result, openai.APITimeoutError) for result in results) > 10
    start = time.monotonic()
    server.complete("hello", 4)
    assert time.monotonic() - start < 5
    server.wait_idle()


VALID = {"model": "tiny", "prompt": "hello"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": ', 400),
        (b"[1]", 400),
        (b'"text"', 400),
        (b"[" * 100000, 400),
        (json.dumps(VALID | {"prompt": "\ud800"}).encode(), 400),
        (json.dumps(VALID | {"model": "another"}).encode(), 404),
        *(
            (json.dumps(VALID | change).encode(), 400)
            for change in (
                {"temperature": -1},
                {"temperature": float("nan")},
                {"temperature": 0.5},
                {"prompt": ""},
                {"prompt": []},
                {"prompt": [""]},
                {"prompt": [[]]},
                {"prompt": [10**6]},
                {"prompt": None},
                {"prompt": "x" * 2 * CONTEXT},
                {"max_tokens": 0},
                {"max_tokens": CONTEXT},
                {"n": 0},
                {"n": 10**6},
                {"stop": [""]},
                {"stream": 1},
                {"logprobs": 3},
                {"no_such_option": 1},
            )
        ),
    ],
)
def test_a_bad_body_is_refused_in_openais_form(server, body, status):
    got, text = server.send(body)
    error = json.loads(text)["error"]
    assert got == status and error["message"] and error["type"]
    assert server.complete("hello", 2).choices


def test_wrong_types_paths_and_sizes_are_refused(server):
    assert server.send(json.dumps(VALID).encode(), "text/plain")[0] == 415
    assert server.send(b"{}", path="/v1/nothing")[0] == 404
    assert server.send(b"", method="GET")[0] == 405
    status, text = server.send(b" " * (5 << 20))
    assert status == 413 and json.loads(text)["error"]["message"]


def test_a_full_queue_answers_503_and_the_key_is_asked_for(model):
    running = Running(model, "--max-waiting", "1", XLA_ATTENTION_API_KEY="secret")
    try:
        with pytest.raises(openai.InternalServerError) as refused:
            running.complete("hello", n=6)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        assert running.complete("hello", n=5).choices
        with pytest.raises(openai.AuthenticationError):
            running.client.with_options(api_key="guess").models.list()
    finally:
        running.stop()


def test_sigterm_lets_open_answers_end(model):
    running = Running(model)
    stream = iter(running.complete("hello", 100, stream=True))
    first = next(stream)
    running.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length" and first.choices[0].finish_reason is None
    assert running.wait() == -signal.SIGTERM
