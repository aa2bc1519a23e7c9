"""A server with --batch-invariant: the same request, the same text and log-probabilities, whatever runs beside it."""

import asyncio

import pytest

from running import Running

SYSTEM = "the beginning that all have, of some pages: "


@pytest.fixture(scope="module")
def invariant(model):
    running = Running(model, "--batch-invariant", "--pages", "32")
    yield running
    running.stop()


def requests() -> list[dict]:
    return [
        {
            "prompt": (SYSTEM if i % 2 else "") + "hello 12 "[: i % 9] + str(i),
            "max_tokens": 3 + i % 20,
            "temperature": i % 3 / 2,
            "seed": i,
            "logprobs": 2,
            "presence_penalty": float(i % 5 == 0),
        }
        for i in range(64)
    ]


def test_64_clients_get_the_bits_that_each_gets_alone(invariant):
    alone = [invariant.complete(**request).choices[0] for request in requests()]
    hits, preemptions = invariant.gauge("prefix_cache_hits_total"), invariant.gauge("preemptions_total")

    async def ask():
        async with invariant.async_client() as client:
            calls = [client.completions.create(model="tiny", **request) for request in requests()]
            return await asyncio.gather(*calls)

    for _ in range(2):
        together = [answer.choices[0] for answer in asyncio.run(ask())]
        assert together == alone
    assert invariant.gauge("prefix_cache_hits_total") > hits
    assert invariant.gauge("preemptions_total") > preemptions
    invariant.wait_idle()
