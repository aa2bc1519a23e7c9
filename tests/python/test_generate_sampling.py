"""The demo's sampling: against NumPy, and that a sequence's choices depend on nothing but itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_llama
from tiny_llama import dense_logits, expected_tokens, tiny_weights

from llama.batch import BatchBuilder  # isort: skip
from llama.checkpoint import load_checkpoint  # isort: skip
from llama.engine import Engine, EngineConfig  # isort: skip
from llama.options import Sampling  # isort: skip
from llama.sampling import gumbel, make_counts, sample  # isort: skip
from llama.scheduler import Chunk, Sequence  # isort: skip

VOCABULARY, SLOTS = 40, 4


def sequence_of(tokens, prompt_length, slot, **options) -> Sequence:
    sequence = Sequence(0, list(tokens), prompt_length, 50, sampling=Sampling(**options))
    sequence.slot = slot
    return sequence


def choose(sequences: list[Sequence], logits: np.ndarray):
    """One sampler call in which every sequence computes all of its tokens."""
    chunks = [Chunk(sequence, 0, len(sequence.tokens), True) for sequence in sequences]
    token_ids = np.array([token for sequence in sequences for token in sequence.tokens], np.int32)
    batch = BatchBuilder(SLOTS, 8, 4).build_sampling(chunks, len(token_ids))
    rows = np.zeros((len(batch.slots), VOCABULARY), np.float32)
    rows[: len(logits)] = logits
    counts = make_counts(SLOTS, VOCABULARY) + 3  # what an earlier sequence left
    sampled, _, last_tokens = jax.jit(sample)(counts, jnp.zeros(SLOTS, jnp.int32), rows, token_ids, batch)
    assert [last_tokens[s.slot] for s in sequences] == list(sampled.tokens[: len(sequences)])
    return sampled


def expected_choice(logits: np.ndarray, tokens, prompt_length: int, options: Sampling) -> int:
    """What `sample` chooses, in f64 by sorting; only the random numbers are the same."""
    logits = logits.astype(np.float64)
    generated = np.bincount(tokens[prompt_length:], minlength=len(logits))
    seen = np.bincount(tokens, minlength=len(logits)) > 0
    factor = options.repetition_penalty
    logits = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - options.frequency_penalty * generated - options.presence_penalty * (generated > 0)
    if not options.temperature:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / options.temperature)
    order = np.argsort(-p)
    kept = order[: options.top_k or None]
    before = np.cumsum(p[kept]) - p[kept]
    kept = kept[before < options.top_p * p[kept].sum()]
    kept = kept[p[kept] >= options.min_p]
    seed = jnp.array([options.seed >> 32, options.seed & 0xFFFFFFFF], jnp.uint32)
    noise = np.asarray(gumbel(seed, len(tokens), len(logits)), np.float64)
    return int(kept[np.argmax(np.log(p[kept]) + noise[kept])])


OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.5},
    "top_k": {"temperature": 2.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "a top_p of one token": {"temperature": 2.0, "top_p": 1e-6},
    "min_p": {"temperature": 2.0, "min_p": 0.2},
    "all of them": {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.5},
    "greedy with penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.3, "repetition_penalty": 1.7},
    "penalties": {"temperature": 1.0, "frequency_penalty": -0.7, "repetition_penalty": 0.6},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_choice_is_that_of_numpy(name):
    rng = np.random.default_rng(3)
    chosen = set()
    for seed in range(12):
        logits = (rng.standard_normal((3, VOCABULARY)) * 2).astype(np.float32)
        sequences = [
            sequence_of(rng.integers(0, VOCABULARY, 9), 4, slot, seed=seed << 33 | slot, **OPTIONS[name])
            for slot in (2, 0, 3)
        ]
        tokens = choose(sequences, logits).tokens.tolist()
        for sequence, row, token in zip(sequences, logits, tokens, strict=False):
            assert token == expected_choice(row, sequence.tokens, 4, sequence.sampling)
        chosen.update(tokens)
    assert len(chosen) > 5


def test_draws_follow_the_softmax():
    logits = np.array([[2.0, 1.0, 0.0, -1.0] + [-np.inf] * (VOCABULARY - 4)], np.float32)
    counts = np.zeros(4)
    for seed in range(0, 400, SLOTS):
        sequences = [sequence_of([1], 1, slot, temperature=1.0, seed=seed + slot) for slot in range(SLOTS)]
        np.add.at(counts, choose(sequences, logits.repeat(SLOTS, axis=0)).tokens, 1)
    p = np.exp(logits[0, :4]) / np.exp(logits[0, :4]).sum()
    chi_squared = ((counts - 400 * p) ** 2 / (400 * p)).sum()
    assert chi_squared < 16.3  # one in a thousand, with three degrees of freedom


def test_log_probabilities_are_those_of_the_logits():
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((1, VOCABULARY)).astype(np.float32)
    options = {"temperature": 2.0, "top_k": 30, "frequency_penalty": 1.0, "logprobs": True, "seed": 4}
    sampled = choose([sequence_of([1, 2, 3], 1, 1, **options)], logits)
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    order = np.argsort(-expected)[:20]
    np.testing.assert_array_equal(sampled.top_tokens[0], order)
    np.testing.assert_allclose(sampled.top_logprobs[0], expected[order], rtol=1e-5)
    np.testing.assert_allclose(sampled.logprobs[0], expected[sampled.tokens[0]], rtol=1e-5)


PROMPTS = [(5, 6, 7, 8, 9, 10, 11), (5, 6, 7, 8, 9, 10, 12, 13, 14), (20, 21), (5, 6, 7, 8), (30,) * 13]
SAMPLINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=2**63 + 5),
    Sampling(temperature=1.2, top_k=10, repetition_penalty=1.3, seed=3),
    Sampling(presence_penalty=0.7, logprobs=True),
]


def expected_text(prompt, options: Sampling, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_choice(dense_logits(tiny_weights(), tokens), tokens, len(prompt), options))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tiny_llama.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_llama.gguf_tensors())
    return load_checkpoint(path, jnp.float32)


@pytest.mark.parametrize(
    ("batch_invariant", "steps_per_launch", "num_programs"), [(False, 1, 10), (True, 1, 2), (False, 3, 16)]
)
def test_texts_are_those_of_numpy_in_every_batch_evicted_or_from_the_prefix_cache(
    checkpoint, batch_invariant, steps_per_launch, num_programs
):
    sizes = EngineConfig(
        16, 4, 4, 16, prefix_cache=True, batch_invariant=batch_invariant, steps_per_launch=steps_per_launch
    )
    engine = Engine(checkpoint.config, checkpoint.weights, sizes)
    assert len(list(engine.compile_all())) == engine.num_programs == num_programs
    expected = [expected_text(p, s, 16) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert expected[1] == list(expected_tokens(PROMPTS[1], 16))
    for order in ((0, 1, 2, 3, 4), (4, 2, 1, 0, 3), (3,), (1,)):
        sequences = {index: engine.add(list(PROMPTS[index]), 16, SAMPLINGS[index]) for index in order}
        engine.run()
        for index, sequence in sequences.items():
            assert sequence.generated == expected[index], index
    assert engine.scheduler.num_evictions > 0 and engine.scheduler.prefix_hits > 0
    assert engine.scheduler.allocator.num_free == 16
    assert (engine.stats.launches < engine.stats.num_steps) == (steps_per_launch > 1)


def test_steps_that_cannot_be_launched_together_are_refused():
    with pytest.raises(ValueError, match="steps_per_launch is 2, expected 1 because of batch_invariant"):
        EngineConfig(16, 4, 4, 16, batch_invariant=True, steps_per_launch=2)
    with pytest.raises(ValueError, match="steps_per_launch is 0, expected at least 1"):
        EngineConfig(16, 4, 4, 16, steps_per_launch=0)


def logprob_bits(engine: Engine, sequences: list[Sequence]) -> dict[Sequence, list]:
    """Every token of each sequence, with the bits of all log-probabilities."""
    bits = {sequence: [] for sequence in sequences}
    while engine.has_work:
        for token in engine.step():
            bits[token.sequence].append((token.id, token.logprob, token.top))
    return bits


def test_a_batch_invariant_engine_gives_the_same_bits_alone_and_beside_others(checkpoint):
    """The prefix cache is empty for a sequence alone and filled for those beside others."""
    rng = np.random.default_rng(0)
    prompts = [[5, 6, 7, 8, 9, *rng.integers(0, 200, rng.integers(1, 40)).tolist()] for _ in range(10)]
    options = [Sampling(temperature=index % 3 / 2, seed=index, logprobs=True) for index in range(10)]
    sizes = EngineConfig(64, 4, 4, 16, prefix_cache=True, batch_invariant=True)
    engine = Engine(checkpoint.config, checkpoint.weights, sizes)
    alone = []
    for prompt, sampling in zip(prompts, options, strict=True):
        engine.scheduler = engine.new_scheduler(64, 16, frozenset())
        sequence = engine.add(prompt, 12, sampling)
        alone.append(logprob_bits(engine, [sequence])[sequence])
    engine.scheduler = engine.new_scheduler(24, 16, frozenset())
    for _ in range(2):
        sequences = [engine.add(prompt, 12, sampling) for prompt, sampling in zip(prompts, options, strict=True)]
        together = logprob_bits(engine, sequences)
        assert [together[sequence] for sequence in sequences] == alone
    assert engine.scheduler.prefix_hits > 20 and engine.scheduler.num_evictions > 0
