"""The demo's oracle, and a tiny random Llama that the tests write to a file themselves.

`dense_greedy` shares only the weight arrays with examples/llama. It uses NumPy, no cache and no pages, and recomputes
the whole sequence for every token.
"""

import functools
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

# The demo is a program, not an installed package: importing this file makes `generate` and `llama` importable.
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 32, 48, 4, 2, 8, 2, 128
EPS, THETA = 2.0**-4, 10000.0  # exact in f32, as GGUF stores them; eps is large enough to matter
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYSTEM = "Be brief."
CHATML = (
    f"{{% if messages[0]['role'] != 'system' %}}{{{{ '<|im_start|>system\n{SYSTEM}<|im_end|>\n' }}}}{{% endif %}}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)


def dense_logits(weights: dict, tokens: list[int]) -> np.ndarray:
    """Logits `[V]` after `tokens`, computed plainly in the dtype of the weights (matrices `[out, in]`)."""
    heads, kv_heads, eps = weights["heads"], weights["kv_heads"], weights["eps"]
    length = len(tokens)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight

    def rotate(x):  # [H, length, D]
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(length), weights["theta"] ** (-np.arange(half) / half))
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(x.dtype)

    def by_head(x, count):  # [length, H * D] -> [H, length, D]
        return x.reshape(length, count, -1).transpose(1, 0, 2)

    x = weights["embed"][tokens]
    for layer in weights["layers"]:
        h = norm(x, layer["attn_norm"])
        q = rotate(by_head(h @ layer["q_proj"].T, heads))
        k = np.repeat(rotate(by_head(h @ layer["k_proj"].T, kv_heads)), heads // kv_heads, axis=0)
        v = np.repeat(by_head(h @ layer["v_proj"].T, kv_heads), heads // kv_heads, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]).astype(q.dtype)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o = (p / p.sum(axis=-1, keepdims=True)) @ v
        x = x + o.transpose(1, 0, 2).reshape(length, -1) @ layer["o_proj"].T
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up_proj"].T)) @ layer["down_proj"].T
    return norm(x[-1], weights["final_norm"]) @ weights["lm_head"].T


def dense_greedy(weights: dict, prompt: list[int], max_new_tokens: int, stop_tokens=frozenset()) -> list[int]:
    """Ids generated after `prompt`, a stop token included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(int(np.argmax(dense_logits(weights, tokens))))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (specials, the byte alphabet, merged ones) and merges of a byte-level BPE."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    return SPECIAL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges], merges


@functools.cache
def tiny_weights() -> dict:
    """Random weights in f64 that are exactly f32, in the checkpoint's order of rotary rows, `[out, in]`."""
    rng = np.random.default_rng(7)

    def matrix(rows, columns, scale):
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32).astype(np.float64)

    def norm_weight():
        return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32).astype(np.float64)

    layer_shapes = {
        "q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    vocab_size = len(vocabulary()[0])
    layers = [
        {name: matrix(*shape, 0.3) for name, shape in layer_shapes.items()}
        | {"attn_norm": norm_weight(), "mlp_norm": norm_weight()}
        for _ in range(LAYERS)
    ]
    return {
        "embed": matrix(vocab_size, HIDDEN, 1.0),
        "layers": layers,
        "final_norm": norm_weight(),
        "lm_head": matrix(vocab_size, HIDDEN, 0.3),
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "eps": EPS,
        "theta": THETA,
    }


@functools.cache
def expected_tokens(prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    """The ids that the oracle generates for the tiny model."""
    return tuple(dense_greedy(tiny_weights(), list(prompt), max_new_tokens))


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in llama.cpp's order: row 2i is the checkpoint's row i, row 2i + 1 its row i + D/2."""
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + i + side * half for head in range(heads) for i in range(half) for side in (0, 1)]
    return weight[order]


def gguf_tensors() -> dict[str, np.ndarray]:
    """The tiny model's tensors under GGUF names."""
    weights = tiny_weights()
    names = {
        "attn_norm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
        "mlp_norm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    tensors = {
        "token_embd.weight": weights["embed"],
        "output_norm.weight": weights["final_norm"],
        "output.weight": weights["lm_head"],
    }
    for index, layer in enumerate(weights["layers"]):
        stored = layer | {
            "q_proj": interleaved(layer["q_proj"], HEADS),
            "k_proj": interleaved(layer["k_proj"], KV_HEADS),
        }
        tensors |= {f"blk.{index}.{names[field]}.weight": stored[field] for field in names}
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, architecture: str = "llama", **metadata) -> Path:
    """Write a Llama GGUF of `tensors`; `metadata` replaces the tokenizer's model, pre and the file's eps."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(metadata.get("heads", HEADS))
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(THETA)
    if "eps" not in metadata or metadata["eps"] is not None:
        writer.add_layer_norm_rms_eps(metadata.get("eps", EPS))
    writer.add_tokenizer_model(metadata.get("model", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(metadata.get("merges", merges))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(CHATML)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_weights_of(checkpoint) -> dict:
    """The loaded weights in the oracle's form: NumPy arrays, matrices `[out, in]`."""
    weights, config = checkpoint.weights, checkpoint.config
    embed = np.asarray(weights.embed)
    return {
        "embed": embed,
        "layers": [{name: np.asarray(value).T for name, value in layer._asdict().items()} for layer in weights.layers],
        "final_norm": np.asarray(weights.final_norm),
        "lm_head": embed if weights.lm_head is None else np.asarray(weights.lm_head),
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "eps": config.rms_norm_eps,
        "theta": config.rope_theta,
    }
