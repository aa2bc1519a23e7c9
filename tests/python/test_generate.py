"""The demo generates the text of dense attention, for every schedule."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_llama
from subprocesses import python
from tiny_llama import dense_greedy, expected_tokens, tiny_weights

import generate  # isort: skip
from llama.checkpoint import default_model_path, load_checkpoint  # isort: skip
from llama.engine import Engine, EngineConfig  # isort: skip


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return tiny_llama.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_llama.gguf_tensors())


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def tiny_engine(request, tiny_gguf):
    """An engine for the tiny model with 40 pages of 4 tokens, 3 slots and a budget of 16, on each platform.

    It launches two steps at a time where that can be.
    """
    with jax.default_device(jax.devices(request.param)[0]), jax.default_matmul_precision("highest"):
        checkpoint = load_checkpoint(tiny_gguf, jnp.float32)
        engine = Engine(checkpoint.config, checkpoint.weights, EngineConfig(40, 4, 3, 16, steps_per_launch=2))
        assert len(list(engine.compile_all())) == engine.num_programs == 5 + 5 + 2 * 3
        yield engine


def generate_with(engine: Engine, prompts, max_new_tokens, *, num_pages, token_budget, stop_tokens=frozenset()):
    """Sequences after a run with a new scheduler; the caches keep the contents of earlier runs."""
    engine.scheduler = engine.new_scheduler(num_pages, token_budget, stop_tokens)
    engine.stats = type(engine.stats)()
    for prompt in prompts:
        engine.add(list(prompt), max_new_tokens)
    sequences = engine.run()
    assert engine.scheduler.allocator.num_free == num_pages
    return sequences


def ragged_prompts(lengths, seed=0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    vocab_size = len(tiny_llama.vocabulary()[0])
    return [tuple(int(token) for token in rng.integers(0, vocab_size, length)) for length in lengths]


# Lengths of prompts, new tokens, pages, token budget, and a condition that the run has to meet.
SCHEDULES = {
    "ragged prompts": ([1, 5, 16, 23, 4, 9], 12, 40, 16, lambda engine, _: engine.stats.decode.steps > 0),
    "chunked prefill beside decode": ([3, 31, 2, 27], 12, 40, 5, lambda engine, _: engine.stats.mixed_steps > 5),
    "evicted and recomputed": ([6, 7, 11, 5], 20, 9, 8, lambda _, actual: sum(s.num_evictions for s in actual) >= 2),
}


@pytest.mark.parametrize(("lengths", "tokens", "pages", "budget", "happened"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_generates_the_text_of_dense_attention(tiny_engine, lengths, tokens, pages, budget, happened):
    prompts = ragged_prompts(lengths, seed=len(lengths))
    sequences = generate_with(tiny_engine, prompts, tokens, num_pages=pages, token_budget=budget)
    assert [tuple(sequence.generated) for sequence in sequences] == [
        expected_tokens(prompt, tokens) for prompt in prompts
    ]
    assert happened(tiny_engine, sequences)
    stats = tiny_engine.stats
    assert stats.num_steps / 2 < stats.launches < stats.num_steps


def test_the_caches_are_updated_in_place(tiny_engine):
    generate_with(tiny_engine, ragged_prompts([5]), 2, num_pages=40, token_budget=16)  # compiles
    before = [cache.unsafe_buffer_pointer() for cache in tiny_engine.caches]
    generate_with(tiny_engine, ragged_prompts([9, 30], seed=4), 12, num_pages=40, token_budget=16)
    assert [cache.unsafe_buffer_pointer() for cache in tiny_engine.caches] == before


def test_a_sequence_ends_with_its_stop_token(tiny_engine):
    prompts = ragged_prompts([4, 8], seed=3)
    stop = frozenset({expected_tokens(prompts[0], 12)[3]})
    sequences = generate_with(tiny_engine, prompts, 12, num_pages=40, token_budget=16, stop_tokens=stop)
    assert [s.generated for s in sequences] == [dense_greedy(tiny_weights(), list(p), 12, stop) for p in prompts]
    assert len(sequences[0].generated) <= 4


@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    max_new_tokens=st.integers(1, 10),
    num_pages=st.integers(9, 40),
    token_budget=st.integers(3, 16),
    seed=st.integers(0, 3),
)
def test_the_text_does_not_depend_on_the_schedule(tiny_engine, lengths, max_new_tokens, num_pages, token_budget, seed):
    prompts = ragged_prompts(lengths, seed)
    sequences = generate_with(tiny_engine, prompts, max_new_tokens, num_pages=num_pages, token_budget=token_budget)
    assert [tuple(s.generated) for s in sequences] == [expected_tokens(prompt, max_new_tokens) for prompt in prompts]


@pytest.mark.slow
def test_smollm2_generates_the_text_of_dense_attention():
    """The real model: all prompts at once, then with a cache and token budget so small that sequences are evicted."""
    checkpoint = load_checkpoint(Path(os.environ.get("XLA_ATTENTION_DEMO_MODEL", default_model_path())), jnp.float32)
    tokenizer, weights = checkpoint.tokenizer, tiny_llama.dense_weights_of(checkpoint)
    texts = ["What is the capital of France?", "Name a colour.", "Count from one to five in words, please.", "Hi!"]
    prompts = [tokenizer.encode_turn(text) for text in texts] + [tokenizer.encode("The opposite of hot is")]
    expected = [dense_greedy(weights, prompt, 10, tokenizer.stop_tokens) for prompt in prompts]
    assert "Paris" in tokenizer.decode(expected[0])
    with jax.default_matmul_precision("highest"):
        engine = Engine(checkpoint.config, checkpoint.weights, EngineConfig(64, 4, 4, 64))
        for num_pages, token_budget in ((64, 64), (23, 16)):
            sequences = generate_with(
                engine, prompts, 10, num_pages=num_pages, token_budget=token_budget, stop_tokens=tokenizer.stop_tokens
            )
            assert [sequence.generated for sequence in sequences] == expected
            assert engine.stats.mixed_steps > 0
    assert sum(sequence.num_evictions for sequence in sequences) > 0


def test_the_program_prints_the_texts_the_rates_and_the_custom_call(tiny_gguf, capsys):
    options = ["--model", str(tiny_gguf), "--max-new-tokens", "4", "--max-num-seqs", "2", "--token-budget", "8"]
    assert generate.main([*options, "--prompt", "hello world", "--prompt", "12 and 3"]) == 0
    printed = capsys.readouterr().out
    assert "prompt 1" in printed and "prompt 2" in printed
    assert 'custom_call_target="xla_gpu_paged_attention_update"' in printed
    assert f"[{tiny_llama.LAYERS} such calls]" in printed
    assert "prefill:" in printed and "decode:" in printed and "compile and warm-up:" in printed


MESH_OPTIONS = [
    *("--prompt", "hello world", "--prompt", "12 and 3", "--prompt", "a long prompt, in chunks"),
    *("--max-new-tokens", "30", "--max-num-seqs", "3", "--token-budget", "9", "--pages", "48", "--page-size", "4"),
]


def texts(printed: str) -> str:
    """What the program printed from the first prompt to the line about the compiled program."""
    return printed[printed.index("--- prompt 1") : printed.index("compiled program")]


@functools.cache
def run_program(model: Path, *options: str, check: bool = True):
    """The program in a separate process, because the number of CPU devices is fixed when JAX starts."""
    options = ["--model", model, "--dtype", "float32", *MESH_OPTIONS, *options]
    program = tiny_llama.EXAMPLES / "generate.py"
    return python(program, *options, check=check, JAX_DEFAULT_MATMUL_PRECISION="highest")


@pytest.mark.parametrize(
    ("mesh", "calls"),
    [
        ("pages=2", 2),
        pytest.param("heads=2", 1, marks=pytest.mark.slow),
        pytest.param("pages=4", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_devices_generate_the_text_of_one(tiny_gguf, on, mesh, calls):
    if on == "cuda" and len(jax.devices("cuda")) < int(mesh[-1]):
        pytest.skip("there are too few GPUs")
    printed = run_program(tiny_gguf, "--platform", on, "--mesh", mesh).stdout
    assert f", {mesh.partition('=')[0]} over {mesh[-1]} devices" in printed
    assert f"[{calls * tiny_llama.LAYERS} such calls]" in printed
    assert texts(printed) == texts(run_program(tiny_gguf, "--platform", on).stdout)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("heads=4", "--mesh heads=4: the model has 2 key/value heads, expected a multiple of 4; pages can be spread"),
        pytest.param(
            "pages=5", "--pages is 48, expected a multiple of 5, the devices of --mesh", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_a_one_line_error_and_exit_code_2(tiny_gguf, mesh, message):
    done = run_program(tiny_gguf, "--platform", "cpu", "--mesh", mesh, check=False)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_a_mesh_of_an_unknown_kind_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as raised:
        generate.main(["--mesh", "rows=2"])
    assert raised.value.code == 2
    assert "'rows=2' is not heads=N or pages=N" in capsys.readouterr().err.splitlines()[-1]


def test_the_custom_call_line_leaves_out_layouts_and_metadata():
    line = (
        "  %custom-call.4 = (f32[4,9,64]{2,1,0}, u8[0]{0}) custom-call(f32[4,9,64]{2,1,0:T(8,128)} %a, f32[2]{0} %b), "
        'custom_call_target="xla_gpu_paged_attention_update", '
        "operand_layout_constraints={f32[4,9,64]{2,1,0}, f32[2]{0}}, "
        'api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(step)" source_line=3}, backend_config={scale = 1.0}'
    )
    assert generate.custom_call_line(f"HloModule m\n{line}\n  ROOT %other = f32[] add()") == (
        "%custom-call.4 = (f32[4,9,64], u8[0]) custom-call(...), "
        'custom_call_target="xla_gpu_paged_attention_update", api_version=API_VERSION_TYPED_FFI, '
        "backend_config={scale = 1.0} [1 such calls]"
    )
    assert "no custom call" in generate.custom_call_line("HloModule m")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no/such/file.gguf"], "no/such/file.gguf: no such file or folder"),
        (["--prompts-file", "no/such/prompts.txt"], "no/such/prompts.txt: cannot be read"),
        (["--pages", "3"], "can never fit"),
        (["--max-new-tokens", "500"], "exceed the model's context of 128"),
        (["--max-num-seqs", "9", "--token-budget", "8"], "--token-budget is 8"),
    ],
)
def test_unusable_options_are_a_one_line_error_and_exit_code_2(tiny_gguf, capsys, options, message):
    # A later --model replaces an earlier one; a prompts file is read only without --prompt.
    prompt = [] if "--prompts-file" in options else ["--prompt", "hello world"]
    assert generate.main(["--model", str(tiny_gguf), *prompt, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_cuda_without_a_gpu_is_a_one_line_error_and_exit_code_2(tiny_gguf):
    program = tiny_llama.EXAMPLES / "generate.py"
    done = python(program, "--model", tiny_gguf, "--platform", "cuda", check=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: platform cuda cannot be used here")
