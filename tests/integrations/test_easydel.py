"""EasyDeL trains a model, and its engine eSurge serves it, with our kernels: beside its own vanilla attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("easydel")

import easydel as ed
from easydel.caching.ragged_page import cache as ragged_cache
from easydel.caching.unified_attention import cache as unified_cache
from easydel.infra.mixins import generation
from easydel.operations import OperationMetadata, OperationRegistry
from easydel.operations.kernels import unified_attention
from ejkernel.types import MaskInfo
from flax import nnx
from recipes import counted_calls, recipe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from xla_attention.integrations.ejkernel import register

jax.config.update("jax_platforms", "cpu")  # the pins have no CUDA plugin of this JAX
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its older flax and JAX

VOCABULARY, LAYERS, HEADS, KV_HEADS = 97, 2, 4, 2
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
PLATFORMS = ("cuda", "triton", "xla")


@pytest.fixture(autouse=True, scope="module")
def registered():
    recipe("EasyDeL")
    register(platforms=PLATFORMS)


def model(mechanism, dtype="float32", head_dim=32):
    """A Llama with the same weights whatever its mechanism is."""
    config = ed.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * head_dim,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        attn_mechanism=mechanism,
        attn_dtype=jnp.dtype(dtype),
        kvdtype=jnp.dtype(dtype),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    options = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype), "precision": jax.lax.Precision.HIGHEST}
    return ed.LlamaForCausalLM(config=config, rngs=nnx.Rngs(0), **options)


def tokens(*shape):
    return np.random.default_rng(0).integers(5, VOCABULARY, shape)


def assert_close(ours, theirs, tolerance):
    theirs = np.float32(theirs)
    np.testing.assert_allclose(np.float32(ours), theirs, atol=tolerance * max(1, np.abs(theirs).max()), rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_trains_with_our_kernels(monkeypatch, dtype):
    calls = counted_calls(monkeypatch)
    ids, mask = jnp.asarray(tokens(2, 12)), jnp.asarray([[1] * 9 + [0] * 3, [1] * 12])
    results, programs = {}, {}
    for mechanism in ("vanilla", "xla_attention"):
        trained = model(mechanism, dtype)
        graph, parameters, rest = nnx.split(trained, nnx.Param, ...)

        def loss(parameters, graph=graph, rest=rest):
            logits = nnx.merge(graph, parameters, rest)(input_ids=ids, attention_mask=mask).logits
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids[..., None], -1)[..., 0]
            return -jnp.sum(picked * mask) / mask.sum(), logits

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        with trained.mesh:
            compiled = step.lower(parameters).compile()
            (value, logits), gradients = compiled(parameters)
        programs[mechanism] = compiled.as_text()
        results[mechanism] = value, logits, jax.tree.leaves(gradients)
    assert calls == ["by_kernels"] * LAYERS
    for target in ("xla_gpu_flash_attn_varlen", "xla_gpu_flash_attn_varlen_bwd"):
        assert target not in programs["vanilla"]
        assert programs["xla_attention"].count(f'custom_call_target="{target}"') == LAYERS
    (value, logits, gradients), (our_value, our_logits, our_gradients) = results.values()
    assert_close(our_value, value, TOLERANCE[dtype])
    valid = np.asarray(mask, bool)
    assert_close(our_logits[valid], logits[valid], TOLERANCE[dtype])
    assert len(gradients) == len(our_gradients) > 9 * LAYERS - 1
    for ours, theirs in zip(our_gradients, gradients, strict=True):
        scale = np.abs(np.float32(theirs)).max()
        assert scale > 0
        np.testing.assert_allclose(np.float32(ours) / scale, np.float32(theirs) / scale, atol=TOLERANCE[dtype])


def operation(name):
    config = model("vanilla").config
    return OperationRegistry.create(name, OperationMetadata.from_config(config))


def operands(keys=12):
    rng = np.random.default_rng(1)
    return {
        name: jnp.float32(rng.standard_normal((2, length, heads, 32)))
        for name, length, heads in (("query", 12, HEADS), ("key", keys, KV_HEADS), ("value", keys, KV_HEADS))
    }


IDS = jnp.asarray([[3] * 5 + [1] * 7, [0] * 4 + [1] * 6 + [-1] * 2])
DOCUMENTS = MaskInfo.from_segments(IDS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.3},
        {"causal": True, "sliding_window": 3},
        {"sliding_window": (4, 2)},
        {"causal": True, "logits_soft_cap": 2.0},
        {"causal": True, "mask_info": DOCUMENTS},
        {"mask_info": DOCUMENTS},
        {"mask_info": MaskInfo(_q_segment_ids=IDS, _kv_segment_ids=IDS[:, :9]), "keys": 9},
    ],
    ids=lambda options: ",".join(options) or "none",
)
def test_the_operation_has_the_meaning_of_vanilla(monkeypatch, options):
    options = {**options}
    arrays = operands(options.pop("keys", 12))
    theirs = operation("vanilla")(**arrays, **options).attention_outputs
    calls = counted_calls(monkeypatch)
    ours = operation("xla_attention")(**arrays, **options).attention_outputs
    assert calls == ["by_kernels"]
    valid = np.ones((2, 12), bool)
    if "mask_info" in options:
        valid = np.asarray(IDS) >= 0
        assert not np.any(ours[~valid])
    assert_close(ours[valid], theirs[valid], 2e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"softmax_aux": jnp.zeros(HEADS)}, "softmax_aux"),
        ({"cache_view": object()}, "cache_view"),
        ({"cum_seqlens_q": jnp.int32([0, 24])}, "cum_seqlens_q"),
        ({"cum_seqlens_k": jnp.int32([0, 24])}, "cum_seqlens_k"),
        ({"normalize_output": False}, "normalize_output=False"),
        ({"dropout_prob": 0.1, "deterministic": False}, "dropout"),
        ({"causal": True, "keys": 9}, "causal with queries and keys of different lengths"),
        (
            {"sliding_window": 3, "keys": 9, "mask_info": MaskInfo(_q_segment_ids=IDS, _kv_segment_ids=IDS[:, :9])},
            "pair",
        ),
        ({"mask_info": DOCUMENTS.replace(chunked_mask_baked_in=True)}, "a mask with chunked in it"),
    ],
    ids=lambda case: ",".join(case) if isinstance(case, dict) else "",
)
def test_what_the_operation_does_not_compute_is_refused(options, text):
    options = {**options}
    arrays = operands(options.pop("keys", 12))
    with pytest.raises(NotImplementedError, match=text):
        operation("xla_attention")(**arrays, **options)


def test_other_ids_of_the_keys_are_nan():
    info = MaskInfo(_q_segment_ids=IDS, _kv_segment_ids=IDS.at[1, 9].set(2))
    out = operation("xla_attention")(**operands(), mask_info=info, causal=True).attention_outputs
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()


class AsOnGpu:
    """The module jax with another default backend."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def default_backend(self):
        return "gpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "dtype", "head_dim", "target"),
    [
        ("ragged_page_attention_v3", "float32", 128, "xla_gpu_paged_attention_update"),
        ("ragged_page_attention_v3", "bfloat16", 64, "xla_gpu_paged_attention_update"),
        ("ragged_page_attention_v2", "float32", 64, "xla_gpu_paged_attention"),
        ("unified_attention", "float32", 64, "xla_gpu_flash_attn_varlen"),
    ],
)
def test_the_engine_generates_with_our_kernels(monkeypatch, tmp_path, mechanism, dtype, head_dim, target):
    for module in (ragged_cache, unified_cache):
        # Without a GPU the caches are 4 GiB, which XLA:CPU copies in each step.
        monkeypatch.setattr(module, "per_device_hbm_budget_bytes", lambda *_, **__: 1 << 20)
    if mechanism == "unified_attention":
        # EasyDeL has it on GPUs alone. It asks ejkernel for the platform "triton", where ours is registered.
        monkeypatch.setattr(unified_attention, "jax", AsOnGpu())
        monkeypatch.setattr(generation, "_resolve_backend_for_esurge", lambda _: "gpu")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    tokenizer.save_pretrained(tmp_path)
    engine = ed.eSurge(
        model=model(mechanism, dtype, head_dim),
        tokenizer=str(tmp_path),
        dtype=jnp.dtype(dtype),
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        min_token_pad=16,
        reserve_tokens=4,
        page_size=16,
        overlap_execution=False,
        async_scheduling=False,
        silent_mode=True,
    )
    try:
        engine.initiate()
        prompts = [" ".join(f"w{i}" for i in tokens(length)) for length in (7, 20)]
        sampling = ed.SamplingParams(max_tokens=6, temperature=0.0)
        outputs = engine.generate(prompts, sampling_params=sampling, use_tqdm=False)
        compiled = engine.runner.executor_manager._model_executor._backbone_cache.values()
        programs = [program.as_text() for program in compiled]
    finally:
        engine.terminate()
        engine._worker_manager.shutdown()
    assert programs
    for program in programs:
        assert program.count(f'custom_call_target="{target}"') == LAYERS
    vanilla = model("vanilla", dtype, head_dim)
    for output in outputs:
        prompt, generated = np.ravel(output.prompt_token_ids), output.outputs[0].token_ids
        assert len(generated) == 6
        with vanilla.mesh:
            logits = np.float32(vanilla(input_ids=jnp.asarray([[*prompt, *generated]])).logits)[0]
        # Each token is the most probable one after those before it, but for rounding.
        chosen = logits[len(prompt) - 1 : -1]
        gap = chosen.max(-1) - chosen[np.arange(6), generated]
        assert np.all(gap <= TOLERANCE[dtype] * np.abs(chosen).max())
