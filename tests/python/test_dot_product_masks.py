"""The masks, sinks and soft cap of dot_product_attention, and its fallback."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dense_attention import dense_attention
from test_dot_product_attention import tensors
from xla_attention.jax import _dot_product_call, dot_product_attention

ROWS, KEYS = 17, 29
POSITIONS = np.arange(KEYS)[None] - np.arange(ROWS)[:, None]
CAUSAL = POSITIONS <= 0
KEY_PADDING = (np.arange(KEYS) < np.array([29, 12, 0])[:, None])[:, None, None]
LEFT_PADDING = (np.arange(KEYS) >= np.array([0, 5, 3])[:, None])[:, None, None]
ROW_PADDING = (np.arange(ROWS) < np.array([17, 4, 9])[:, None])[:, None, :, None]
SCATTERED = np.random.default_rng(5).random((3, 1, 1, KEYS)) < 0.5
DOCUMENTS = (np.arange(ROWS)[:, None] // 5 == np.arange(KEYS)[None] // 8)[None, None]
ANY = np.random.default_rng(6).random((3, 1, ROWS, KEYS)) < 0.5

# Masks that the kernels compute if their values are known.
KNOWN = {
    "causal": CAUSAL[None, None],
    "two dimensions": CAUSAL,
    "all": np.ones((1, 1, ROWS, KEYS), bool),
    "none": np.zeros((3, 1, ROWS, KEYS), bool),
    "causal, later": POSITIONS[None, None] <= KEYS - ROWS,
    "window": ((POSITIONS >= -3) & (POSITIONS <= 2))[None, None],
    "left window": (POSITIONS >= -3)[None, None],
    "right window": (POSITIONS <= 4)[None, None],
    "sliding window": ((POSITIONS >= -4) & CAUSAL)[None, None],
    "key padding": KEY_PADDING,
    "left padding": LEFT_PADDING,
    "row padding": ROW_PADDING,
    "both": ROW_PADDING & KEY_PADDING,
    "causal and padding": CAUSAL & ROW_PADDING & KEY_PADDING,
    "causal and left padding": CAUSAL & LEFT_PADDING,
    "window and left padding": (POSITIONS >= -3) & (POSITIONS <= 2) & LEFT_PADDING,
    "of each head": np.broadcast_to(CAUSAL, (1, 6, ROWS, KEYS)),
    "of a batch": np.broadcast_to(CAUSAL, (3, 1, ROWS, KEYS)),
    "strictly causal": (POSITIONS < 0)[None, None],
    "windows differ": np.stack([POSITIONS <= 0, POSITIONS <= 1, POSITIONS <= 2])[:, None],
    "prefix": np.stack([CAUSAL | (np.arange(KEYS) < prefix) for prefix in (5, 0, 29)])[:, None],
    "documents": DOCUMENTS,
    "documents, causal": DOCUMENTS & CAUSAL,
    "chunks": (np.arange(KEYS)[None] // 6 == np.arange(ROWS)[:, None] // 6)[None, None],
    "blocks, causal": (np.arange(KEYS)[None] // 6 <= np.arange(ROWS)[:, None] // 6)[None, None],
    "gaps": ((POSITIONS >= 0) & (POSITIONS <= 2) & (np.arange(ROWS) % 4 == 1)[:, None])[None, None],
}
# Masks that become a bias.
OTHERS = {
    "any": ANY,
    "one head differs": np.concatenate([np.ones((1, 1, ROWS, KEYS), bool)] * 5 + [CAUSAL[None, None]], 1),
    "two ranges": (np.arange(KEYS) % 9 != 4)[None, None, None],
}


def check(mask, options, *, wrap=jax.jit, operands=None, expected_mask=None, **oracle):
    """Assert that the results are those of the oracle, and the gradients those of JAX's function."""
    operands = tensors() if operands is None else operands
    full = np.broadcast_to(mask if expected_mask is None else expected_mask, (3, 6, ROWS, KEYS))
    expected = dense_attention(*operands, full, **oracle)
    if isinstance(mask, jax.Array):
        call = wrap(lambda mask, *x: dot_product_attention(*x, mask=mask, return_residual=True, **options))
        call = functools.partial(call, mask)
    else:
        call = wrap(lambda *x: dot_product_attention(*x, mask=mask, return_residual=True, **options))
    for actual, wanted in zip(call(*operands), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("mask", KNOWN.values(), ids=KNOWN)
def test_a_known_mask_is_recognised(platform, mask):
    check(mask, {})
    check(mask, {}, wrap=lambda f: f)


@pytest.mark.parametrize("mask", KNOWN.values(), ids=KNOWN)
def test_a_mask_joins_the_other_masks(platform, mask):
    options = {
        "local_window_size": (6, 8),
        "query_seq_lengths": jnp.array([17, 3, 12]),
        "key_value_seq_lengths": jnp.array([20, 29, 4]),
    }
    in_window = (POSITIONS >= -6) & (POSITIONS <= 8)
    rows = np.arange(ROWS)[None, :, None] < np.array([17, 3, 12])[:, None, None]
    keys = np.arange(KEYS)[None, None] < np.array([20, 29, 4])[:, None, None]
    check(mask, options, expected_mask=mask & (in_window & rows & keys)[:, None])
    check(mask, {"is_causal": True}, expected_mask=mask & CAUSAL)


def test_an_array_of_jax_is_a_known_mask_also_within_jit():
    mask = jnp.asarray(KNOWN["causal"])
    operands = tensors()
    expected = dot_product_attention(*operands, is_causal=True)
    for wrap in (jax.jit, lambda f: f):
        actual = wrap(lambda *x: dot_product_attention(*x, mask=mask))(*operands)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_another_mask_becomes_a_bias(platform, mask, wrap):
    check(mask, {}, wrap=wrap)
    check(mask, {"is_causal": True}, wrap=wrap, expected_mask=mask & CAUSAL)
    check(jnp.asarray(mask), {"sinks": jnp.linspace(-1, 2, 6)}, wrap=wrap, sinks=np.linspace(-1, 2, 6))


@pytest.mark.parametrize("name", ["causal", "key padding", "prefix", "of each head", "none"])
def test_a_traced_mask_becomes_a_bias(platform, name):
    check(jnp.asarray(KNOWN[name]), {})
    check(jnp.asarray(KNOWN[name]), {"local_window_size": 9}, expected_mask=KNOWN[name] & (abs(POSITIONS) <= 9))


BIASES = {
    "full": (3, 6, ROWS, KEYS),
    "of heads": (1, 6, ROWS, KEYS),
    "of entries": (3, 1, ROWS, KEYS),
    "of two dimensions": (ROWS, KEYS),
    "of keys": (3, 1, 1, KEYS),
    "of rows": (6, ROWS, 1),
    "of one number": (),
}
BESIDE_BIAS = {
    "alone": ({}, True),
    "causal": ({"is_causal": True}, CAUSAL),
    "window and lengths": (
        {"local_window_size": 12, "key_value_seq_lengths": np.int32([20, 29, 14])},
        (abs(POSITIONS) <= 12) & (np.arange(KEYS) < np.array([20, 29, 14])[:, None, None, None]),
    ),
    "known mask": ({"mask": KNOWN["causal and left padding"]}, KNOWN["causal and left padding"]),
    "prefix": ({"mask": KNOWN["prefix"]}, KNOWN["prefix"]),
    "any mask": ({"mask": ANY}, ANY),
    "mask of keys": ({"mask": jnp.asarray(SCATTERED)}, SCATTERED),
    "promised ranges": ({"mask": jnp.asarray(DOCUMENTS), "mask_form": "ranges"}, DOCUMENTS),
    "ends": ({"k_end": np.full((3, ROWS), 13)}, np.arange(KEYS) < 13),
    "segments": (
        {"segment_ids": (np.repeat([[1, 2]] * 3, [9, 8], 1), np.repeat([[1, 2]] * 3, [15, 14], 1))},
        (np.arange(ROWS)[:, None] < 9) == (np.arange(KEYS) < 15),
    ),
}


def biased_attention(q, k, v, bias, mask):
    """Attention by its definition; rows without a key are 0."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5 + bias
    shown = jnp.broadcast_to(mask, scores.shape)
    weights = jnp.where(shown, jax.nn.softmax(jnp.where(shown, scores, -1e30)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_a_bias_has_the_gradients_of_the_definition(platform, shape):
    check_bias(np.random.default_rng(9).standard_normal(shape).astype(np.float32), {}, True)


def test_a_bias_of_wide_heads_has_the_gradients_of_the_definition(platform):
    operands = [jnp.tile(x, 9) / 3 for x in tensors()]
    bias = jnp.asarray(np.random.default_rng(9).standard_normal((1, 6, ROWS, KEYS)), jnp.float32)

    def gradients(attend):
        return jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2, 3))(*operands, bias)

    ours = gradients(lambda q, k, v, bias: dot_product_attention(q, k, v, bias))
    for actual, expected in zip(ours, gradients(lambda *x: biased_attention(*x, True)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("options", "mask"), BESIDE_BIAS.values(), ids=BESIDE_BIAS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_bias_joins_the_masks(platform, options, mask, wrap):
    check_bias(np.random.default_rng(9).standard_normal((1, 6, ROWS, KEYS)).astype(np.float32), options, mask, wrap)


def check_bias(bias, options, mask, wrap=lambda f: f):
    def total(attend):
        return wrap(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2, 3)))

    ours = total(lambda q, k, v, bias: dot_product_attention(q, k, v, bias, **options))
    definition = total(lambda q, k, v, bias: biased_attention(q, k, v, bias, mask))
    operands = (*tensors(), jnp.asarray(bias))
    for a, b in zip(jax.tree.leaves(ours(*operands)), jax.tree.leaves(definition(*operands)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4)


def test_a_bias_gives_what_jax_gives(platform):
    bias, operands = jnp.linspace(-1, 1, 6 * ROWS * KEYS).reshape(1, 6, ROWS, KEYS), tensors()
    options = {"is_causal": True, "local_window_size": 6, "key_value_seq_lengths": np.int32([20, 29, 9])}
    with jax.default_matmul_precision("highest"):  # on GPUs JAX computes products of f32 in TF32
        expected = jax.nn.dot_product_attention(*operands, bias, **options, return_residual=True)
    actual = dot_product_attention(*operands, bias, **options, return_residual=True)
    shown = (CAUSAL & (POSITIONS >= -6) & (np.arange(KEYS) < np.int32([20, 29, 9])[:, None, None])).any(-1)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours[shown], theirs[shown], atol=3e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_a_bias_of_another_dtype(platform, dtype):
    bias = jnp.asarray(np.random.default_rng(9).integers(-2, 3, (1, 6, ROWS, KEYS)), dtype)
    for of in ("float32", "bfloat16"):
        operands = [x.astype(of) for x in tensors()]
        actual = dot_product_attention(*operands, bias)
        expected = dot_product_attention(*operands, bias.astype("float32"))
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=1e-2 if of == "bfloat16" else 1e-6)


def test_the_gradient_of_a_bias_is_computed_only_where_it_is_asked_for():
    operands, bias = tensors(), jnp.zeros((1, 6, ROWS, KEYS))

    def calls(*argnums):
        total = jax.grad(lambda *x: dot_product_attention(*x).sum(), argnums)
        lines = jax.jit(total).lower(*operands, bias).as_text().splitlines()
        (call,) = [line for line in lines if "varlen_bwd(" in line]
        return call.split("->")[-1].count("tensor<1x6x17x29xf32>")

    assert (calls(0, 1, 2), calls(3), calls(0, 3)) == (0, 1, 1)


def test_a_bias_that_hides_every_key_of_a_row_gives_0(platform):
    bias = np.zeros((1, 1, ROWS, KEYS), np.float32)
    bias[:, :, 4] = -np.inf
    operands = tensors()
    out, residual = dot_product_attention(*operands, bias, return_residual=True)
    assert not np.asarray(out)[:, 4].any()
    assert np.isneginf(np.asarray(residual)[:, 4]).all()
    gradients = jax.grad(lambda *x: dot_product_attention(*x).sum(), range(4))(*operands, jnp.asarray(bias))
    assert all(np.isfinite(x).all() for x in gradients)
    assert not np.asarray(gradients[0])[:, 4].any()
    assert not np.asarray(gradients[3])[:, :, 4].any()


def test_padding_ids_beside_a_bias(platform):
    ids = np.array([[1] * 9 + [0] * 8] * 3)
    keys = np.array([[1] * 20 + [0] * 9] * 3)
    sinks = jnp.linspace(-1, 2, 6)
    options = {"segment_ids": (ids, keys), "padding_segment_id": 0, "sinks": sinks, "return_residual": True}
    expected = dot_product_attention(*tensors(), **options)
    actual = dot_product_attention(*tensors(), jnp.zeros((1, 1, ROWS, KEYS)), **options)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.fixture
def copies_keys(monkeypatch):
    """Keys that a mask shows are copied also for few queries, which otherwise take a bias."""
    monkeypatch.setattr(_dot_product_call, "_MAX_BIAS_QUERIES", 0)


@pytest.mark.parametrize("mask", [KEY_PADDING, LEFT_PADDING, SCATTERED, SCATTERED[:1], SCATTERED[0, 0, 0]])
def test_a_traced_mask_of_keys_is_computed(platform, mask):
    check(jnp.asarray(mask), {})
    lengths = np.array([20, 3, 29])
    keys = (np.arange(KEYS) < lengths[:, None])[:, None, None]
    check(jnp.asarray(mask), {"key_value_seq_lengths": jnp.asarray(lengths)}, expected_mask=mask & keys)


@pytest.mark.usefixtures("copies_keys")
@pytest.mark.parametrize("mask", [KEY_PADDING, SCATTERED[:1]])
def test_a_traced_mask_of_many_queries_is_computed(platform, mask):
    test_a_traced_mask_of_keys_is_computed(platform, mask)


@pytest.mark.parametrize("other", [{"is_causal": True}, {"local_window_size": 3}], ids=str)
def test_a_traced_mask_of_keys_joins_masks_by_position(platform, other):
    in_window = CAUSAL if "is_causal" in other else abs(POSITIONS) <= 3
    check(jnp.asarray(SCATTERED), other, expected_mask=SCATTERED & in_window)


PROMISED = {
    "causal": ("causal", CAUSAL[None, None]),
    "causal and padding": ("causal", KNOWN["causal and padding"]),
    "causal and left padding": ("causal", KNOWN["causal and left padding"]),
    "padding": ("padding", KEY_PADDING),
    "padding of rows": ("padding", KNOWN["both"]),
    "left padding": ("padding", np.broadcast_to(LEFT_PADDING, (3, 1, ROWS, KEYS))),
    "no key": ("causal", KNOWN["none"]),
    "prefix": ("ranges", KNOWN["prefix"]),
    "documents of one row for all": ("ranges", KEY_PADDING),
    "documents": ("ranges", DOCUMENTS),
    "gaps": ("ranges", KNOWN["gaps"]),
}


@pytest.mark.parametrize(("form", "mask"), PROMISED.values(), ids=PROMISED)
def test_a_promised_mask_is_computed(platform, form, mask):
    check(jnp.asarray(mask), {"mask_form": form})


@pytest.mark.parametrize("form", ["causal", "padding", "ranges"])
def test_a_broken_promise_gives_nan_in_its_entry_of_the_batch(platform, form):
    mask = np.array(np.broadcast_to(KNOWN["causal and padding" if form == "causal" else "both"], (3, 1, ROWS, KEYS)))
    mask[1, 0, 2, :] = np.arange(KEYS) % 5 == 2 if form == "ranges" else ~mask[1, 0, 2, :]
    operands = tensors()

    def call(mask, *operands):
        return dot_product_attention(*operands, mask=mask, mask_form=form, return_residual=True)

    out, residual = jax.jit(call)(jnp.asarray(mask), *operands)
    assert np.isnan(out[1]).all() and np.isnan(residual[1]).all()
    expected = dense_attention(*operands, mask)
    for actual, wanted in zip((out, residual), expected, strict=True):
        np.testing.assert_allclose(np.delete(actual, 1, 0), np.delete(wanted, 1, 0), atol=3e-5, rtol=3e-5)
    gradient = jax.jit(jax.grad(lambda q, mask: call(mask, q, *operands[1:])[0].sum()))(operands[0], jnp.asarray(mask))
    assert np.isnan(gradient[1]).any() and np.isfinite(np.delete(gradient, 1, 0)).all()


@pytest.mark.parametrize("form", ["causal", "padding"])
def test_one_query_attends_to_a_promised_range(platform, form):
    q, k, v = tensors(rows=1)
    mask = (np.arange(KEYS) <= 11)[None, None, None]
    actual = jax.jit(lambda mask: dot_product_attention(q, k, v, mask=mask, mask_form=form))(jnp.asarray(mask))
    np.testing.assert_allclose(actual, dense_attention(q, k, v, mask)[0], atol=2e-5)


MASKED = {
    "known": (KNOWN["causal and left padding"], {}, False),
    "keys": (SCATTERED, {}, True),
    "promised": (KNOWN["causal and padding"], {"mask_form": "causal"}, True),
    "ranges": (KNOWN["prefix"], {}, False),
    "promised ranges": (KNOWN["prefix"], {"mask_form": "ranges"}, True),
}


@pytest.mark.parametrize(("mask", "options", "traced"), MASKED.values(), ids=MASKED)
def test_masks_have_gradients_and_vmap(platform, mask, options, traced):
    q, k, v = tensors()
    full = np.broadcast_to(mask, (3, 1, ROWS, KEYS))
    has_keys = full.any(-1)[:, 0, :, None, None]

    def total(attend, mask, *operands):  # JAX gives the mean of the values to rows without a key
        return jnp.sum(jnp.where(has_keys, jnp.sin(attend(*operands, mask=mask)), 0))

    ours = functools.partial(total, functools.partial(dot_product_attention, **options))
    with jax.default_matmul_precision("highest"):
        expected = jax.grad(functools.partial(total, jax.nn.dot_product_attention), (1, 2, 3))(full, q, k, v)
    if traced:
        actual = jax.jit(jax.grad(ours, (1, 2, 3)))(jnp.asarray(mask), q, k, v)
    else:
        actual = jax.jit(jax.grad(functools.partial(ours, mask), (0, 1, 2)))(q, k, v)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)

    masks = jnp.stack([jnp.asarray(full), jnp.asarray(full)[::-1]]) if traced else None
    many = [jnp.stack([x, 2 * x]) for x in (q, k, v)]

    def one(mask_of_call, *operands):
        return dot_product_attention(*operands, mask=mask if mask_of_call is None else mask_of_call, **options)

    if traced and not options:
        masks = masks[..., :1, :]
    together = jax.vmap(one, in_axes=(0 if traced else None, 0, 0, 0))(masks, *many)
    for i, sign in enumerate((1, -1)):
        wanted = full[::sign] if traced else full
        np.testing.assert_allclose(together[i], dense_attention(*(x[i] for x in many), wanted)[0], atol=3e-5, rtol=3e-5)


@pytest.mark.usefixtures("copies_keys")
def test_masks_of_many_queries_have_gradients_and_vmap(platform):
    test_masks_have_gradients_and_vmap(platform, *MASKED["keys"])


@pytest.mark.parametrize(("rows", "are_copied"), [(1, False), (64, False), (65, True)])
def test_keys_are_sorted_and_copied_for_many_queries_only(rows, are_copied):
    q, (_, k, v) = tensors(rows=rows)[0], tensors()
    call = jax.jit(lambda mask: dot_product_attention(q, k, v, mask=mask))
    assert ("stablehlo.sort" in call.lower(jnp.asarray(SCATTERED)).as_text()) == are_copied


@pytest.mark.parametrize(
    "oracle", [{"softcap": 1.5}, {"sinks": np.linspace(-1, 2, 6, dtype=np.float32)}, {"scale": -0.4}, {"scale": 0.0}]
)
def test_scores(platform, oracle):
    check(KNOWN["causal and padding"], oracle, **oracle)


def test_sinks_and_the_soft_cap_have_gradients(platform):
    q, k, v = tensors()
    sinks = jnp.linspace(-1, 2, 6)

    def ours(q, sinks):
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, is_causal=True, sinks=sinks, softcap=1.5)))

    def plain(q, sinks):
        keys, values = (jnp.repeat(x, 3, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, keys, precision="highest") * 32**-0.5
        scores = jnp.where(CAUSAL, 1.5 * jnp.tanh(scores / 1.5), -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
        return jnp.sum(jnp.sin(jnp.einsum("bnts,bsnh->btnh", weights, values, precision="highest")))

    for a, b in zip(jax.grad(ours, (0, 1))(q, sinks), jax.grad(plain, (0, 1))(q, sinks), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


# Calls that only JAX's function computes: a change of the operands, options, and the error without a fallback.
OF_JAX = {
    "negative window": (lambda *x: x, {"local_window_size": (-1, 4)}, r"local_window_size is \(-1, 4\), expected >= 0"),
    "head dimension": (
        lambda *x: [y[..., :20] for y in x],
        {
            "bias": jnp.ones((6, 1, KEYS)),
            "is_causal": True,
            "query_seq_lengths": np.array([17, 3, 12]),
            "key_value_seq_lengths": np.array([20, 29, 4]),
            "local_window_size": 6,
        },
        "query has head dimension 20",
    ),
}


@pytest.mark.parametrize(("change", "options", "text"), OF_JAX.values(), ids=OF_JAX)
def test_what_the_kernels_do_not_compute_follows_the_fallback(change, options, text):
    operands = change(*tensors())
    with pytest.raises(NotImplementedError, match=f'^dot_product_attention: {text}.*; fallback="xla" lets jax.nn.dot'):
        dot_product_attention(*operands, **options)
    converted = {name: x.astype(np.int32) if name.endswith("lengths") else x for name, x in options.items()}
    expected = jax.nn.dot_product_attention(*operands, **converted, return_residual=True)
    actual = dot_product_attention(*operands, **options, fallback="xla", return_residual=True)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    single = dot_product_attention(*operands, **options, fallback="xla")
    np.testing.assert_array_equal(single, expected[0])


def test_a_traced_scale_follows_the_fallback():
    operands = tensors()
    actual = jax.jit(lambda scale: dot_product_attention(*operands, scale=scale, fallback="xla"))(0.3)
    np.testing.assert_allclose(actual, dot_product_attention(*operands, scale=0.3), atol=2e-5)


@pytest.mark.parametrize("options", [{"sinks": jnp.zeros(6)}, {"softcap": 2.0}], ids=["sinks", "softcap"])
@pytest.mark.parametrize("way", [{"implementation": "xla"}, {"fallback": "xla", "local_window_size": -1}])
def test_jax_has_neither_sinks_nor_a_soft_cap(options, way):
    with pytest.raises(NotImplementedError, match="(sinks|softcap) is not supported by jax.nn.dot_product_attention"):
        dot_product_attention(*tensors(), **options, **way)


STARTS, ENDS = np.random.default_rng(7).integers(-4, 20, (3, ROWS)), np.random.default_rng(8).integers(0, 40, (3, ROWS))
BOUNDS = {
    "both": {"k_start": STARTS, "k_end": ENDS},
    "starts": {"k_start": STARTS},
    "ends": {"k_end": ENDS},
}


def within(k_start=None, k_end=None):
    """The mask of the bounds."""
    mask = np.ones((3, ROWS, KEYS), bool)
    if k_start is not None:
        mask &= k_start[:, :, None] <= np.arange(KEYS)
    if k_end is not None:
        mask &= np.arange(KEYS) < k_end[:, :, None]
    return mask[:, None]


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds_of_each_query_join_the_other_masks(platform, bounds):
    mask = within(**bounds)
    check(None, bounds, expected_mask=mask)
    check(None, {"is_causal": True, **bounds}, expected_mask=mask & CAUSAL)
    check(KEY_PADDING, bounds, expected_mask=mask & KEY_PADDING)
    check(KNOWN["prefix"], bounds, expected_mask=mask & KNOWN["prefix"])
    check(None, {"sinks": jnp.linspace(-1, 2, 6), **bounds}, expected_mask=mask, sinks=np.linspace(-1, 2, 6))


def test_jax_computes_bounds_as_a_mask():
    bounds, operands = BOUNDS["both"], tensors()
    out, residual = dot_product_attention(*operands, **bounds, implementation="xla", return_residual=True)
    expected = dense_attention(*operands, within(**bounds))
    for actual, wanted in zip((out, residual), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=3e-5, rtol=3e-5)


def test_bounds_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"k_end has shape \[17\], expected \[3, 17\]"):
        dot_product_attention(*tensors(), k_end=np.arange(ROWS))
