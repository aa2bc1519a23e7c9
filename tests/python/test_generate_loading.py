"""The demo's model files: weights, tokenizers, and errors for invalid files."""

import functools
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import tiny_llama

import generate  # isort: skip
from llama.checkpoint import default_model_path, load_checkpoint  # isort: skip
from llama.config import ModelError  # isort: skip
from llama.gguf_file import GgufModel, open_reader  # isort: skip
from llama.hf_folder import HfModel  # isort: skip
from llama.tokenizer import default_system_message, tokenizer_from_gguf  # isort: skip

repeatable = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(path: Path):
    return load_checkpoint(path, jnp.float32)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return tiny_llama.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_llama.gguf_tensors())


@pytest.fixture
def write(tmp_path):
    """Write a variant of the tiny GGUF: some tensors replaced (None: left out), metadata as `write_gguf` takes it."""

    def write_variant(replaced: dict | None = None, **metadata) -> Path:
        tensors = tiny_llama.gguf_tensors() | (replaced or {})
        kept = {name: value for name, value in tensors.items() if value is not None}
        return tiny_llama.write_gguf(tmp_path / "variant.gguf", kept, **metadata)

    return write_variant


@pytest.fixture
def hf_folder(tmp_path, tiny_gguf) -> Path:
    """The tiny model as a Hugging Face folder in two shards."""
    weights = tiny_llama.tiny_weights()
    tensors = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["final_norm"],
        "lm_head.weight": weights["lm_head"],
    }
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    names |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    for index, layer in enumerate(weights["layers"]):
        tensors |= {f"model.layers.{index}.{names[name]}.weight": layer[name] for name in layer}
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    first = {name: value for name, value in tensors.items() if ".0." in name}
    second = {name: value for name, value in tensors.items() if ".0." not in name}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(hf_settings()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": tiny_llama.CHATML}))
    tokenizer_from_gguf(GgufModel(tiny_gguf)).tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def hf_settings(**changes) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": tiny_llama.HIDDEN,
        "intermediate_size": tiny_llama.INNER,
        "num_attention_heads": tiny_llama.HEADS,
        "num_key_value_heads": tiny_llama.KV_HEADS,
        "num_hidden_layers": tiny_llama.LAYERS,
        "vocab_size": len(tiny_llama.vocabulary()[0]),
        "max_position_embeddings": tiny_llama.CONTEXT,
        "rms_norm_eps": tiny_llama.EPS,
        "rope_theta": tiny_llama.THETA,
        "eos_token_id": [0, 2],
    } | changes


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_gguf_file_gives_the_weights_in_the_checkpoints_order(tiny_gguf):
    loaded, expected = tiny_llama.dense_weights_of(load(tiny_gguf)), tiny_llama.tiny_weights()
    for name in ("embed", "final_norm", "lm_head"):
        np.testing.assert_array_equal(loaded[name], expected[name])
    for loaded_layer, wanted_layer in zip(loaded["layers"], expected["layers"], strict=True):
        for name, value in wanted_layer.items():
            np.testing.assert_array_equal(loaded_layer[name], value, err_msg=name)


def test_a_hugging_face_folder_gives_the_same_model_as_the_gguf_file(tiny_gguf, hf_folder):
    from_gguf, from_folder = load(tiny_gguf), load(hf_folder)
    assert from_folder.config == from_gguf.config
    same = [np.array_equal(a, b) for a, b in zip(leaves(from_gguf), leaves(from_folder), strict=True)]
    assert all(same) and len(same) == 4 + 9 * tiny_llama.LAYERS
    text = "hello <|im_end|> world 12"
    assert from_folder.tokenizer.encode_turn(text) == from_gguf.tokenizer.encode_turn(text)
    assert from_folder.tokenizer.stop_tokens == {0, 2} and from_gguf.tokenizer.stop_tokens == {2}


def leaves(checkpoint) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpoint.weights)]


def test_bfloat16_and_float16_tensors_of_a_folder_are_read(tmp_path, hf_folder):
    import ml_dtypes

    model = HfModel(hf_folder)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        tensors = {name: model.read(name).astype(dtype) for name in model.tensor_names()}
        for path in tmp_path.glob("model*"):
            path.unlink()
        save_file(tensors, tmp_path / "model.safetensors")
        read = HfModel(tmp_path)
        assert all(np.array_equal(read.read(name), value.astype(np.float32)) for name, value in tensors.items())


def test_a_model_without_output_weights_predicts_with_its_embedding(write):
    assert load(write({"output.weight": None})).weights.lm_head is None


def test_rotary_factors_of_a_gguf_file_divide_the_frequencies(tiny_gguf, write):
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    plain, scaled = load(tiny_gguf).weights.inv_freq, load(write({"rope_freqs.weight": factors})).weights.inv_freq
    np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_allclose(scaled, plain / factors, rtol=1e-6)


def test_rotary_scaling_of_a_folder(hf_folder):
    def factors(**scaling):
        (hf_folder / "config.json").write_text(json.dumps(hf_settings(rope_scaling=scaling)))
        return HfModel(hf_folder).rope_factors()

    assert factors(rope_type="default") is None
    assert factors(type="linear", factor=4.0).tolist() == [4.0] * 4
    # Wavelengths are 6.3, 63, 628 and 6283 positions: up to 512/4 stays, above 512/1 is divided, between is blended.
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    np.testing.assert_allclose(factors(rope_type="llama3", **llama3), [1, 1, 8, 8])
    between = factors(rope_type="llama3", **llama3 | {"original_max_position_embeddings": 1024})[2]
    assert between == pytest.approx(1 / ((1 - (b := (1024 / 628.3185 - 1) / 3)) / 8 + b), rel=1e-5)
    with pytest.raises(NotImplementedError, match="rope_type is 'yarn'"):
        factors(rope_type="yarn")
    with pytest.raises(ModelError, match="KeyError"):
        factors(rope_type="llama3")


# --- tokens -----------------------------------------------------------------------------------------------------------


@functools.cache
def tiny_tokenizer(path: Path):
    return tokenizer_from_gguf(GgufModel(path))


def test_merges_digits_and_special_tokens_follow_the_metadata(tiny_gguf):
    tokens, _ = tiny_llama.vocabulary()
    tokenizer, text = tiny_tokenizer(tiny_gguf), "naïve café — 東京 \U0001f600\n\n\tdone  ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    shown = [tokens[index] for index in tokenizer.encode("hello wow12<|im_end|>")]
    # "1 2" is a merge, but the pre-tokenizer separates digits.
    assert shown == ["hello", "Ġwo", "w", "1", "2", "<|im_end|>"]


def test_a_turn_is_written_as_the_chat_template_says(tiny_gguf):
    tokenizer = tiny_tokenizer(tiny_gguf)
    written = tokenizer.tokenizer.decode(tokenizer.encode_turn("hello"), skip_special_tokens=False)
    assert written == (
        f"<|im_start|>system\n{tiny_llama.SYSTEM}<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_default_models_vocabulary_and_template():
    tokenizer = tokenizer_from_gguf(GgufModel(default_model_path()))
    text = "Bonjour, it's 2024: naïve café — 東京 \U0001f600\n\n\tdone  ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    written = tokenizer.tokenizer.decode(tokenizer.encode_turn("Hi"), skip_special_tokens=False)
    assert written == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.stop_tokens == {2} and tokenizer.encode_turn("Hi").count(1) == 3


# --- bad files --------------------------------------------------------------------------------------------------------


@settings(repeatable, max_examples=60)
@given(data=st.data())
def test_every_truncated_gguf_file_is_refused(tiny_gguf, tmp_path, data):
    whole = tiny_gguf.read_bytes()
    end_of_data = max(tensor.data_offset + tensor.n_bytes for tensor in open_reader(tiny_gguf).tensors)
    path = tmp_path / "truncated.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, end_of_data - 1))])
    with pytest.raises(
        ModelError, match="truncated.gguf: (not a GGUF file|corrupted or truncated GGUF file)"
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@settings(repeatable, max_examples=100)
@given(data=st.data())
def test_damage_before_the_tensors_is_an_error_or_harmless(tiny_gguf, tmp_path, data):
    content = bytearray(tiny_gguf.read_bytes())
    start_of_data = open_reader(tiny_gguf).data_offset
    position = data.draw(st.integers(0, start_of_data - 9))
    width = data.draw(st.sampled_from([1, 4, 8]))
    content[position : position + width] = data.draw(st.binary(min_size=width, max_size=width))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        load(path)
    except (ModelError, NotImplementedError) as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)  # noqa: PT017


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("replaced", "metadata", "error", "message"),
    [
        ({"blk.1.attn_k.weight": None}, {}, ModelError, "tensor blk.1.attn_k.weight is missing, expected 2 layers"),
        ({"blk.0.ffn_up.weight": zeros(48, 16)}, {}, ModelError, r"has shape \[48, 16\], expected \[48, 32\]"),
        ({"output_norm.weight": np.full(32, np.nan, np.float32)}, {}, ModelError, "values that are not finite"),
        ({"blk.0.attn_q.bias": zeros(32)}, {}, NotImplementedError, "tensor blk.0.attn_q.bias does not belong"),
        ({"rope_freqs.weight": zeros(3)}, {}, ModelError, r"rope_freqs.weight has shape \[3\], expected \[4\]"),
        ({}, {"architecture": "mamba"}, NotImplementedError, "general.architecture is 'mamba', expected 'llama'"),
        ({}, {"heads": 5}, ModelError, "head_count is 5, expected a divisor of llama.embedding_length = 32"),
        ({}, {"eps": None}, ModelError, "metadata key llama.attention.layer_norm_rms_epsilon is missing"),
        ({}, {"eps": 3.0}, ModelError, "rms_norm_eps is 3.0, expected a number between 0 and 1"),
        ({}, {"model": "llama"}, NotImplementedError, "tokenizer.ggml.model is 'llama', supported is 'gpt2'"),
        ({}, {"merges": ["h zzz"]}, ModelError, "tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"),
    ],
)
def test_an_unusable_gguf_file_is_an_error_that_names_it(write, capsys, replaced, metadata, error, message):
    path = write(replaced, **metadata)
    with pytest.raises(error, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert generate.main(["--model", str(path)]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_a_missing_file_and_a_wrong_magic_are_errors_that_name_the_file(tmp_path):
    with pytest.raises(ModelError, match="absent.gguf: no such file or folder"):
        load(tmp_path / "absent.gguf")
    (tmp_path / "wrong.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match=r"wrong.gguf: not a GGUF file: it begins with b'GGML', expected b'GGUF'"):
        load(tmp_path / "wrong.gguf")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, NotImplementedError, r"expected \['LlamaForCausalLM'\]"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act is 'gelu', expected 'silu'"),
        ({"hidden_size": "32"}, ModelError, "hidden_size is '32', expected int"),
        ({"num_hidden_layers": 2**40}, ModelError, "model.layers.2.* is missing"),
        ({"num_hidden_layers": 1}, NotImplementedError, "does not belong to a Llama decoder of 1 layers"),
        ({"intermediate_size": 64}, ModelError, r"has shape \[48, 32\], expected \[64, 32\]"),
        ({"vocab_size": 100}, ModelError, "the tokenizer has token id 265, the embedding has 100 rows"),
        ({"eos_token_id": "two"}, ModelError, "eos_token_id is 'two'"),
        ({"rope_theta": 0.5}, ModelError, "rope_theta is 0.5"),
    ],
)
def test_an_unusable_folder_is_an_error_that_names_it(hf_folder, changes, error, message):
    (hf_folder / "config.json").write_text(json.dumps(hf_settings(**changes)))
    with pytest.raises(error, match=message) as caught:
        load(hf_folder)
    assert str(caught.value).startswith(str(hf_folder))


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("config.json", b"{", "config.json: not valid JSON"),
        ("config.json", None, "config.json: cannot be opened"),
        ("tokenizer.json", None, "tokenizer.json: is missing"),
        ("model-00002-of-00002.safetensors", b"12345678", "model-00002-of-00002.safetensors: cannot be read"),
        ("model.safetensors.index.json", b"{}", "weight_map is missing"),
        ("model.safetensors.index.json", None, "model.safetensors: cannot be read"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(hf_folder, file_name, content, message):
    (hf_folder / file_name).unlink()
    if content is not None:
        (hf_folder / file_name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load(hf_folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b", "a\\b", "C:model", 3, None])
def test_an_index_that_names_a_file_elsewhere_is_refused(hf_folder, name):
    index = hf_folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"lm_head.weight": name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        ModelError, match=r"index.json: the file of lm_head.weight is .*, expected a name without a folder"
    ):
        load(hf_folder)


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>system\n" * 20000,
        "<|im_start|>system\n" * 20000 + "'<|im_end|>",
        "<|im_start|>system\n'" * 20000 + "<|im_end|>",
    ],
)
def test_a_long_chat_template_is_parsed_in_linear_time(template):
    began = time.monotonic()
    assert default_system_message(template) is None
    # 0.02 s on two cores; the square of 20000 turns takes minutes.
    assert time.monotonic() - began < 2
