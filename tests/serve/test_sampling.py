"""Sampling, log-probabilities and the prefix cache by HTTP."""

import numpy as np
import openai
import pytest

from tiny_llama import dense_logits, tiny_weights

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello 12"}], "max_tokens": 12}


def texts(answer) -> list[str]:
    return [choice.text for choice in answer.choices]


def test_a_seed_decides_the_text(server):
    options = {"max_tokens": 20, "temperature": 1, "top_p": 0.9, "extra_body": {"top_k": 50, "min_p": 0.01}}
    first = texts(server.complete("hello", seed=5, **options))
    assert texts(server.complete("hello", seed=5, **options)) == first
    assert texts(server.complete("hello", seed=-6, **options)) != first
    streamed = server.complete("hello", seed=5, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == first[0]


def test_every_choice_has_a_seed_of_its_own_and_without_a_seed_texts_differ(server):
    several = texts(server.complete("hello", 20, temperature=1, n=4, seed=7))
    assert len(set(several)) == 4
    assert texts(server.complete("hello", 20, temperature=1, seed=9)) == [several[2]]
    unseeded = {
        texts(server.client.completions.create(model="tiny", prompt="hello", max_tokens=20))[0] for _ in range(3)
    }
    assert len(unseeded) == 3


def test_penalties_and_top_k_reach_the_step(server):
    greedy = texts(server.complete("hello hello hello", 24))
    assert texts(server.complete("hello hello hello", 24, temperature=1, extra_body={"top_k": 1})) == greedy
    for option in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 3}}):
        changed = texts(server.complete("hello hello hello", 24, **option))
        assert changed != greedy and texts(server.complete("hello hello hello", 24, **option)) == changed


def test_log_probabilities_of_a_completion_are_numpys(server, tokenizer):
    answer = server.complete("hello wo", 6, logprobs=3).choices[0]
    got, tokens = answer.logprobs, tokenizer.encode("hello wo")
    for position in range(len(got.tokens)):
        logits = dense_logits(tiny_weights(), tokens)
        expected = np.sort(logits - np.log(np.exp(logits).sum()))[::-1]
        assert got.token_logprobs[position] == pytest.approx(expected[0], abs=1e-4)
        # Bytes that are no character have the same text, so that there may be fewer than three.
        top = list(got.top_logprobs[position].values())
        assert top[0] == pytest.approx(expected[0], abs=1e-4) and len(top) <= 3
        assert all(np.abs(expected[:3] - logprob).min() < 1e-4 for logprob in top)
        tokens.append(int(np.argmax(logits)))
    assert max(map(len, got.top_logprobs)) == 3
    assert "".join(got.tokens) == answer.text and got.text_offset[0] == 0
    chunks = list(server.complete("hello wo", 6, logprobs=3, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == got.tokens
    assert server.complete("hello wo", 6, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_log_probabilities_of_a_chat(server):
    create = server.client.chat.completions.create
    whole = create(**CHAT, seed=3, logprobs=True, top_logprobs=2).choices[0]
    entries = whole.logprobs.content
    assert "".join(entry.token for entry in entries if entry.bytes) and len(entries[0].top_logprobs) == 2
    assert all(entry.bytes is None or bytes(entry.bytes).decode() == entry.token for entry in entries)
    chunks = list(create(**CHAT, seed=3, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert create(**CHAT, seed=3).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs is given without logprobs"):
        create(**CHAT, top_logprobs=2)


def test_log_probabilities_end_where_the_text_ends(server):
    whole = server.complete("hello", 16, logprobs=1).choices[0]
    stop = whole.text[4:7]
    cut = server.complete("hello", 16, logprobs=1, stop=stop).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.logprobs.text_offset == [at for at in whole.logprobs.text_offset if at < len(cut.text)]


def test_a_prompt_that_begins_alike_is_taken_from_the_cache(server):
    prompt = "of several pages: hello hello 1 2 and on, only for this test"
    first = texts(server.complete(prompt, 8))
    hits = server.gauge("prefix_cache_hits_total")
    assert texts(server.complete(prompt, 8)) == first
    assert server.gauge("prefix_cache_hits_total") >= hits + 16
    assert server.gauge("prefix_cache_queries_total") > server.gauge("prefix_cache_hits_total")
    server.wait_idle()
