"""The server asked by the openai package, and by plain sockets for what that cannot say."""

import asyncio
import functools
import json
import signal
import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from running import Running
from tiny_llama import CONTEXT, expected_tokens

PROMPTS = ["hello wo 12", "the", "a longer prompt, of several pages: hello hello 1 2", "x"]


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
    options = {"model": "tiny", "messages": messages, "max_tokens": 10, "temperature": 0}
    whole = server.client.chat.completions.create(**options)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert whole.choices[0].message.content == server.complete(turns, 10).choices[0].text
    assert whole.choices[0].message.role == "assistant"
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert server.client.chat.completions.create(**options | {"messages": parts}).choices == whole.choices
    for content in (None, [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["text"]):
        with pytest.raises(openai.BadRequestError):
            server.client.chat.completions.create(**options | {"messages": [{"role": "user", "content": content}]})
    chunks = list(server.client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content


def test_the_asynchronous_client_gets_what_the_synchronous_one_gets(server):
    messages = [{"role": "user", "content": "hello 12"}]
    sampled = {"n": 2, "seed": 3, "temperature": 0.8, "top_p": 0.9, "max_tokens": 8, "model": "tiny"}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    calls = {
        "completions": [{"prompt": "hello"}, {"prompt": "hello", "logprobs": 2}, {"prompt": ["a", "b"], "stop": "e"}],
        "chat.completions": [{"messages": messages}, {"messages": messages, "logprobs": True, "top_logprobs": 2}],
    }

    def of(client, kind):
        return functools.reduce(getattr, kind.split("."), client).create

    async def ask():
        async with server.async_client() as client:
            models = [model async for model in client.models.list()]
            whole = [await of(client, kind)(**sampled | body) for kind, bodies in calls.items() for body in bodies]
            chunks = [
                [c async for c in await of(client, k)(**sampled | b | usage)] for k, bs in calls.items() for b in bs
            ]
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**sampled | {"prompt": ""})
            return models, whole, chunks

    models, whole, chunks = asyncio.run(ask())
    assert models == list(server.client.models.list())
    expected = [of(server.client, kind)(**sampled | body) for kind, bodies in calls.items() for body in bodies]
    assert [answer.choices for answer in whole] == [answer.choices for answer in expected]
    assert [answer.usage for answer in whole] == [answer.usage for answer in expected] == [c[-1].usage for c in chunks]
    for parts, answer in zip(chunks, expected, strict=True):
        for choice in answer.choices:
            of_choice = [c.choices[0] for c in parts[:-1] if c.choices[0].index == choice.index]
            if hasattr(choice, "text"):
                assert "".join(part.text for part in of_choice) == choice.text
            else:
                assert "".join(part.delta.content for part in of_choice) == choice.message.content
            assert of_choice[-1].finish_reason == choice.finish_reason


def test_several_prompts_and_choices(server, tokenizer):
    answer = server.complete(PROMPTS, 6, n=2)
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
            create = functools.partial(client.completions.create, model="tiny", temperature=0)
            calls = [create(prompt=p, max_tokens=2 + len(p) % 7) for p in prompts]
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
                {"temperature": 2.5},
                {"temperature": "hot"},
                {"top_p": 0},
                {"min_p": 1.5},
                {"top_k": -2},
                {"presence_penalty": 3},
                {"repetition_penalty": 0},
                {"seed": 0.5},
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
                {"logprobs": 21},
                {"logprobs": True},
                {"echo": True},
                {"logit_bias": {"1": 2}},
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


def test_the_metrics_count_requests_and_tokens(server):
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(server.send(b"", method="GET", path="/metrics")[1].decode())
        return {sample.name.removeprefix("xla_attention_"): sample.value for f in families for sample in f.samples}

    server.wait_idle()
    before = read()
    usage = server.complete("hello wo 12", 9, extra_body={"ignore_eos": True}).usage
    server.wait_idle()
    after = read()
    counted = {name: after[name] - before[name] for name in after}
    assert (counted["prompt_tokens_total"], counted["generation_tokens_total"]) == (usage.prompt_tokens, 9)
    assert counted["time_to_first_token_seconds_count"] == 1 and counted["inter_token_latency_seconds_count"] == 8
    assert counted["steps_total"] >= 9
    assert counted["late_launches_total"] <= counted["launches_total"] <= counted["steps_total"]
    assert 0 < counted["inter_token_latency_seconds_sum"] < 60
    gauges = {"requests_running", "requests_waiting", "kv_cache_usage"}
    assert gauges | {"preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"} <= after.keys()


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
    stream = iter(running.complete("hello", 100, stream=True, n=16, extra_body={"ignore_eos": True}))
    first = next(stream)  # four of the 16 choices run, so most are still to come
    running.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in (first, *stream)]
    assert reasons.count("length") == 16
    assert running.wait() == -signal.SIGTERM
