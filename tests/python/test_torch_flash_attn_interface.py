"""The functions with flash-attn's names: signatures, results and gradients beside a plain formula, and the cache."""

import inspect
import math

import pytest
import torch

from xla_attention.torch import flash_attn_interface as fa

pytestmark = pytest.mark.usefixtures("all_torch_devices")

# The parameters of flash-attn 2.8.3, in order.
_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {_OPTIONS})",
    "flash_attn_kvpacked_func": f"(q, kv, {_OPTIONS})",
    "flash_attn_qkvpacked_func": f"(qkv, {_OPTIONS})",
    "flash_attn_varlen_func": f"(q, k, v, {_LENGTHS}, {_OPTIONS}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {_LENGTHS}, {_OPTIONS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {_OPTIONS})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False)",
}


def test_signatures_are_those_of_flash_attn():
    bare = {"annotation": inspect.Parameter.empty}
    actual = {}
    for name in fa.__all__:
        signature = inspect.signature(getattr(fa, name))
        parameters = [parameter.replace(**bare) for parameter in signature.parameters.values()]
        actual[name] = str(inspect.Signature(parameters))
    assert actual == SIGNATURES


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, leftpad=0):
    """`out` and `lse` of one sequence in f64, by the formulas of flash-attn's documentation."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * ahead.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.arange(k.shape[0])[None] < leftpad
    hidden = hidden | ((ahead < -left) if left >= 0 else hidden) | ((ahead > right) if right >= 0 else hidden)
    scores = scores.masked_fill(hidden, -math.inf)
    empty = hidden.expand(ahead.shape).all(1)
    weights = torch.softmax(scores.masked_fill(empty[:, None], 0.0), -1).masked_fill(empty[:, None], 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty[:, None], 0.0), -1).masked_fill(empty, math.inf)
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def dense(q, k, v, *, slopes=None, **options):
    """`attention` of every sequence of a batch."""
    slopes = slopes if slopes is None or slopes.dim() == 2 else slopes.expand(q.shape[0], -1)
    rows = [
        attention(*qkv, **options, slopes=None if slopes is None else slopes[b])
        for b, qkv in enumerate(zip(q, k, v, strict=True))
    ]
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))


def assert_close(actual, expected, bound=2e-5):
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach(), atol=bound, rtol=bound)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, -0.25], [0.1, 0.2, 0.3, 0.4]])
# Options of flash_attn_func, and those of `dense`.
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "causal window": ({"causal": True, "window_size": (2, 5)}, {"causal": True, "window": (2, 5)}),
    "any negative number is no limit": ({"window_size": [-7, 3], "softcap": -1.0}, {"window": (-1, 3)}),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.7}, {"softcap": 1.5, "scale": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES[0], "causal": True}, {"slopes": SLOPES[0], "causal": True}),
    "alibi by sequence": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
}


@pytest.mark.parametrize(("lengths", "dims"), [((5, 9), (64, 64)), ((9, 5), (64, 32)), ((6, 6), (20, 12))], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense_attention(torch_device, name, lengths, dims):
    given, expected = OPTIONS[name]
    given = {key: x.to(torch_device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    q, k, v = (
        random(2, lengths[0], 4, dims[0]),
        random(2, lengths[1], 2, dims[0], seed=1),
        random(2, lengths[1], 2, dims[1]),
    )
    expected_out, expected_lse = dense(q, k, v, **expected)
    operands = [x.to(torch_device) for x in (q, k, v)]
    out, lse, probabilities = fa.flash_attn_func(*operands, **given, return_attn_probs=True)
    assert out.device.type == torch_device and lse.is_contiguous() and probabilities.shape == (0,)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    assert torch.equal(fa.flash_attn_func(*swapped, **given).cpu(), out.cpu())


def test_rows_without_keys_are_zero_and_their_lse_is_positive_infinity(torch_device):
    q, k = random(1, 4, 2, 32).to(torch_device), random(1, 2, 2, 32).to(torch_device)
    out, lse, _ = fa.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert not out[:, :2].any() and out[:, 2:].any()
    assert (lse.cpu() == math.inf)[0].tolist() == [[True, True, False, False]] * 2
    none = k[:, :0]
    out, lse, _ = fa.flash_attn_func(q, none, none, return_attn_probs=True)
    assert not out.any() and (lse == math.inf).all()
    assert fa.flash_attn_func(q[:, :0], k, k).shape == (1, 0, 2, 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_dtypes(torch_device, dtype):
    q, k, v = (random(2, 33, heads, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    out = fa.flash_attn_func(*(x.to(torch_device) for x in (q, k, v)), causal=True)
    assert out.dtype == dtype
    assert_close(out, dense(q, k, v, causal=True)[0], 2 * torch.finfo(dtype).eps)


def gradients(function, leaves, dout, dlse):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = function(*leaves)[:2]
    return torch.autograd.grad((out * dout.to(out)).sum() + (lse * dlse.to(lse)).sum(), leaves)


@pytest.mark.parametrize("form", ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"])
def test_gradients(torch_device, form):
    heads = 4 if "qkv" in form else 2
    q, k, v = random(2, 7, 4, 20), random(2, 7, heads, 20, seed=1), random(2, 7, heads, 20, seed=2)
    dout, dlse = random(2, 7, 4, 20, seed=3), random(2, 4, 7, seed=4)
    expected = gradients(lambda *qkv: dense(*qkv, causal=True), [x.double() for x in (q, k, v)], dout, dlse)
    operands = {"func": lambda: (q, k, v), "kvpacked_func": lambda: (q, torch.stack([k, v], 2))}.get(
        form.removeprefix("flash_attn_"), lambda: (torch.stack([q, k, v], 2),)
    )()

    def call(*leaves):
        return getattr(fa, form)(*leaves, causal=True, deterministic=True, return_attn_probs=True)

    actual = gradients(call, [x.to(torch_device) for x in operands], dout.to(torch_device), dlse.to(torch_device))
    parts = [x for grad in actual for x in (grad.unbind(2) if grad.dim() == 5 else [grad])]
    for part, wanted in zip(parts, expected, strict=True):
        assert_close(part, wanted, 1e-4)


LENGTHS = [(5, 7), (1, 9), (0, 3), (8, 4)]


def starts(lengths, device):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)


def packed_batch(device):
    """Operands of flash_attn_varlen_func, and the expected `out` and `lse` of a causal call."""
    rows = [sum(lengths) for lengths in zip(*LENGTHS, strict=True)]
    q, k, v = random(rows[0], 4, 32), random(rows[1], 2, 32, seed=1), random(rows[1], 2, 32, seed=2)
    expected, ends = [], [0, 0]
    for len_q, len_k in LENGTHS:
        own_q, own_k = slice(ends[0], ends[0] + len_q), slice(ends[1], ends[1] + len_k)
        expected.append(attention(q[own_q], k[own_k], v[own_k], causal=True))
        ends = [own_q.stop, own_k.stop]
    out, lse = (torch.cat(x, dim) for x, dim in zip(zip(*expected, strict=True), (0, 1), strict=True))
    lens = [starts([pair[i] for pair in LENGTHS], device) for i in (0, 1)]
    return [x.to(device) for x in (q, k, v)], lens, out, lse


def test_packed_sequences(torch_device):
    (q, k, v), lens, expected_out, expected_lse = packed_batch(torch_device)
    options = {"causal": True, "return_attn_probs": True}
    out, lse, probabilities = fa.flash_attn_varlen_func(q, k, v, *lens, 8, 9, **options)
    assert probabilities.shape == (0,)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    if torch_device != "xla":  # transformers passes lengths as tensors
        lengths = (torch.tensor(8, device=torch_device), torch.tensor(9, device=torch_device))
        assert torch.equal(fa.flash_attn_varlen_func(q, k, v, *lens, *lengths, causal=True), out)
    actual = fa.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lens, 8, 9, **options)
    assert torch.equal(actual[0].cpu(), out.cpu()) and torch.equal(actual[1].cpu(), lse.cpu())
    qkv = torch.stack([k, k, v], 1)
    actual = fa.flash_attn_varlen_qkvpacked_func(qkv, lens[1], 9, **options)
    expected = fa.flash_attn_varlen_func(k, k, v, lens[1], lens[1], 9, 9, **options)
    assert torch.equal(actual[0].cpu(), expected[0].cpu()) and torch.equal(actual[1].cpu(), expected[1].cpu())


def pages_of(rows, lengths, page_size):
    """The rows of packed sequences in pages, whose other slots are NaN, and the block table."""
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.full((sum(counts) + 2, page_size, *rows.shape[1:]), math.nan, dtype=rows.dtype)
    table, free, first = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32), 1, 0
    for b, n in enumerate(lengths):
        for page in range(counts[b]):
            here = rows[first + page * page_size : first + min(n, (page + 1) * page_size)]
            pages[free, : len(here)] = here
            table[b, page], free = free, free + 1
        first += n
    return pages, table


def test_packed_queries_over_pages(torch_device):
    (q, k, v), lens, expected_out, _ = packed_batch("cpu")
    lengths = [pair[1] for pair in LENGTHS]
    (k, table), (v, _) = (pages_of(x, lengths, 4) for x in (k, v))
    q, k, v, table, *lens = (x.to(torch_device) for x in (q, k, v, table, *lens))
    out = fa.flash_attn_varlen_func(q.requires_grad_(), k, v, *lens, 8, 9, causal=True, block_table=table)
    assert_close(out, expected_out)
    if torch_device == "cpu":
        with pytest.raises(NotImplementedError, match="no gradient through keys in pages"):
            out.sum().backward()


def rotate(x, positions, cos, sin, interleaved):
    """RoPE by complex numbers in f64: [S, H, D] by the rows `positions` of the tables."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    pairs = x[..., : 2 * half].double()
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    return torch.cat([pairs.flatten(-2), x[..., 2 * half :].double()], -1)


# What a call over a cache has beside q, the caches, new tokens and lengths.
CACHES = {
    "dense": {},
    "causal": {"causal": True},
    "another row": {"cache_batch_idx": torch.tensor([3, 0], dtype=torch.int32), "causal": True},
    "left padding": {"cache_leftpad": torch.tensor([2, 0], dtype=torch.int32), "causal": True},
    "pages": {"block_table": torch.tensor([[5, 1, 7], [2, 0, 4]], dtype=torch.int32), "causal": True},
    "rotated pairs": {"rotary": 8, "rotary_interleaved": True, "causal": True},
    "rotated halves": {"rotary": 16, "rotary_interleaved": False, "window_size": (3, 1)},
    "rotated by one position": {"rotary": 8, "rotary_interleaved": False},
    "a window that is no limit": {"rotary": 8, "window_size": (12, 12)},
    "softcap and alibi": {"softcap": 2.0, "alibi_slopes": SLOPES, "causal": True, "num_splits": 3},
    "padded head dimension": {"causal": True, "dim": 20},
}


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("name", CACHES)
def test_attention_over_a_cache(torch_device, name, new):
    options = dict(CACHES[name])
    rotary, dim = options.pop("rotary", 0), options.pop("dim", 32)
    if rotary and not new:
        pytest.skip("only new tokens are rotated")
    table = options.get("block_table")
    shape = (4, 12, 2, dim) if table is None else (8, 4, 2, dim)
    k_cache, v_cache = random(*shape), random(*shape, seed=1)
    q = random(2, 3, 4, dim, seed=2)
    k, v = random(2, new, 2, dim, seed=3), random(2, new, 2, dim, seed=4)
    lens = torch.tensor([5, 8], dtype=torch.int32)
    tables = [f(random(12, rotary // 2, seed=5)) for f in (torch.cos, torch.sin)] if rotary else [None, None]

    # The sequences of the cache, as views of it: what is written to them is expected in the cache.
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    rows = options.get("cache_batch_idx", torch.arange(2))
    expected_out, expected_lse = [], []
    for b in range(2):
        n = int(lens[b])
        advances = options.get("causal", False) or options.get("window_size") == (3, 1)
        new_k, own_q = k[b].double(), q[b]
        if rotary:
            new_k = rotate(k[b], torch.arange(n, n + new), *tables, options.get("rotary_interleaved", True))
            positions = torch.arange(n, n + 3) if advances else torch.full((3,), n)
            own_q = rotate(q[b], positions, *tables, options.get("rotary_interleaved", True))
        places = [(int(rows[b]), p) if table is None else (int(table[b, p // 4]), p % 4) for p in range(12)]
        for i in range(new):
            expected_k[places[n + i]], expected_v[places[n + i]] = new_k[i].float(), v[b, i]
        keys, values = (torch.stack([x[place] for place in places])[: n + new] for x in (expected_k, expected_v))
        slopes = options.get("alibi_slopes")
        out, lse = attention(
            own_q,
            keys,
            values,
            causal=options.get("causal", False),
            window=options.get("window_size", (-1, -1)),
            softcap=options.get("softcap", 0.0),
            slopes=None if slopes is None else slopes[b],
            leftpad=int(options["cache_leftpad"][b]) if "cache_leftpad" in options else 0,
        )
        expected_out.append(out)
        expected_lse.append(lse)

    operands = [x.to(torch_device) for x in (q, k_cache, v_cache)]
    if new:
        operands += [x.to(torch_device) for x in (k, v)]
        options |= {f"rotary_{f}": x.to(torch_device) for f, x in zip(("cos", "sin"), tables, strict=True) if rotary}
    options = {key: x.to(torch_device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    lens = lens.to(torch_device)
    out, lse = fa.flash_attn_with_kvcache(*operands, cache_seqlens=lens, return_softmax_lse=True, **options)
    assert_close(out, torch.stack(expected_out))
    assert_close(lse, torch.stack(expected_lse))
    assert_close(operands[1], expected_k.double(), 1e-6)
    assert torch.equal(operands[2].cpu(), expected_v)


def test_one_length_for_all_and_the_whole_cache_by_default(torch_device):
    q, k, v = (random(2, n, 2, 32, seed=n).to(torch_device) for n in (1, 6, 7))
    v = v[:, :6]
    expected = fa.flash_attn_func(q, k, v)
    assert_close(fa.flash_attn_with_kvcache(q, k, v), expected.cpu().double(), 1e-6)
    shorter = fa.flash_attn_func(q, k[:, :4], v[:, :4])
    assert_close(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=4), shorter.cpu().double(), 1e-6)


def test_tokens_without_room_are_not_stored(torch_device):
    cache, row = torch.zeros(2, 4, 1, 8, device=torch_device), torch.ones(2, 3, 1, 8, device=torch_device)
    values, lens = cache.clone(), torch.tensor([2, 4], dtype=torch.int32, device=torch_device)
    fa.flash_attn_with_kvcache(row, cache, values, row, 2 * row, cache_seqlens=lens)
    assert cache[:, :, 0, 0].cpu().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert values[:, :, 0, 0].cpu().tolist() == [[0, 0, 2, 2], [0, 0, 0, 0]]


def test_a_strided_cache_is_updated_in_place():
    both, row = torch.zeros(2, 4, 2, 3, 8), torch.ones(2, 1, 3, 8)
    keys, values = both.unbind(2)
    fa.flash_attn_with_kvcache(row, keys, values, row, 2 * row, cache_seqlens=1)
    assert both[:, 1].sum() == 2 * 3 * 8 * 3 and both.sum() == both[:, 1].sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_functions_compile_in_one_graph(device):
    q, k, v = (random(2, 5, heads, 32).to(device) for heads in (4, 2, 2))
    cache = torch.zeros(2, 2, 8, 2, 32, device=device)
    lens = torch.tensor([1, 3], dtype=torch.int32, device=device)

    def step(q, k, v, k_cache, v_cache, lens):
        out = fa.flash_attn_func(q, k, v, causal=True)
        return out, fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True)

    caches = [cache.clone() for _ in range(2)]
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v, *caches[0], lens)
    for result, expected in zip(actual, step(q, k, v, *caches[1], lens), strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(*caches) and caches[0].any()


Q, KV, LENS = torch.ones(2, 3, 4, 32), torch.ones(2, 3, 2, 32), torch.tensor([1, 2])
TABLE = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fa.flash_attn_func(Q, KV, KV, 0.1), NotImplementedError,
         "^flash_attn_func: there is no dropout; dropout_p is 0.1, expected 0"),
        (lambda: fa.flash_attn_varlen_qkvpacked_func(Q[:, :3], LENS, 3, dropout_p=0.5), NotImplementedError,
         "^flash_attn_varlen_qkvpacked_func: there is no dropout"),
        (lambda: fa.flash_attn_func(Q[0], KV, KV), ValueError,
         r"^flash_attn_func: q has shape \[3, 4, 32\], expected \[batch, seqlen, nheads, headdim\]"),
        (lambda: fa.flash_attn_func(Q, KV[:1], KV), ValueError,
         r"k has shape \[1, 3, 2, 32\], expected \[2, seqlen_k, nheads_k, headdim\]"),
        (lambda: fa.flash_attn_func(Q, KV, KV[:, :2]), ValueError,
         r"v has shape \[2, 2, 2, 32\], expected \[2, 3, nheads_k, headdim_v\]"),
        (lambda: fa.flash_attn_func(Q, KV, KV, window_size=3), ValueError,
         r"^flash_attn_func: window_size is 3, expected \(left, right\), two integers"),
        (lambda: fa.flash_attn_func(Q, KV, KV, softmax_scale=0.0), ValueError, "softmax_scale"),
        (lambda: fa.flash_attn_func(Q, KV.half(), KV.half()), NotImplementedError, "q is f32, k is f16"),
        (lambda: fa.flash_attn_kvpacked_func(Q, KV), ValueError,
         r"kv has shape .* expected \[batch, seqlen, 2, nheads_k, headdim\]"),
        (lambda: fa.flash_attn_qkvpacked_func(Q), ValueError, r"qkv has shape"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV[:1], KV[:1]), ValueError,
         "expected at least 2 rows, one per sequence of q, or a cache_batch_idx or"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, KV, KV), ValueError, "cache_seqlens is None, expected lengths"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, KV, cache_seqlens=1), ValueError, "k is given without v"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, rotary_cos=TABLE, rotary_sin=TABLE), ValueError,
         "rotary_cos and rotary_sin need k and v"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, KV, KV, TABLE, cache_seqlens=1), ValueError,
         "rotary_cos is given without rotary_sin"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, KV, KV, TABLE[:2], TABLE[:2], 1), ValueError,
         r"rotary_cos has shape \[2, 8\], expected at least 3 rows"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, cache_batch_idx=LENS, block_table=LENS[:, None]), ValueError,
         "cache_batch_idx is given beside a block_table"),
        (lambda: fa.flash_attn_with_kvcache(Q, KV, KV, cache_seqlens=LENS[:1]), ValueError,
         r"cache_seqlens has shape \[1\], expected \[2\]"),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()
