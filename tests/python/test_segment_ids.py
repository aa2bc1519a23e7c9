"""The segment ids of dot_product_attention against the mask that they stand for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dense_attention import dense_attention
from test_dot_product_attention import tensors
from xla_attention.jax import dot_product_attention

SIZE = 17


def runs(*pairs):
    """Ids as (id, length) pairs."""
    return np.concatenate([np.full(length, value) for value, length in pairs])


ROWS = {
    "one": runs((3, 17)),
    "three": runs((1, 5), (2, 4), (3, 8)),
    "any order": runs((7, 2), (-4, 9), (2**31 - 1, 1), (0, 5)),
    "each": np.arange(17)[::-1].copy(),
}
PADDED = {
    "after": runs((1, 5), (2, 4), (0, 8)),
    "everywhere": runs((0, 2), (4, 3), (0, 1), (0, 2), (2, 4), (9, 1), (0, 4)),
    "all": runs((0, 17)),
}
ALONE = np.stack(list(ROWS.values()))[:3]
WITH_PADDING = np.stack(list(PADDED.values()))


def mask_of(queries, keys, padding=None):
    mask = queries[:, :, None] == keys[:, None, :]
    return (mask if padding is None else mask & (queries != padding)[:, :, None])[:, None]


def check(operands, segment_ids, visible, *, traced=True, oracle=None, **options):
    """Assert that results are the oracle's, eagerly and jitted."""
    expected = dense_attention(*operands, visible, **(oracle or {}))

    def call(ids, *operands):
        return dot_product_attention(*operands, segment_ids=ids, return_residual=True, **options, **(oracle or {}))

    calls = [jax.jit(call)(segment_ids, *operands)] if traced else []
    for results in (call(segment_ids, *operands), *calls):
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=3e-5, rtol=3e-5)


CAUSAL = np.tril(np.ones((SIZE, SIZE), bool))
OFFSET = np.arange(SIZE)[None] - np.arange(SIZE)[:, None]
OPTIONS = {
    "full": ({}, np.ones((1, 1, 1, 1), bool)),
    "causal": ({"is_causal": True}, CAUSAL),
    "window": ({"local_window_size": (2, 1)}, (OFFSET >= -2) & (OFFSET <= 1)),
    "causal window": ({"local_window_size": 2, "is_causal": True}, (OFFSET >= -2) & CAUSAL),
    "lengths": (
        {"query_seq_lengths": np.array([9, 17, 3]), "key_value_seq_lengths": np.array([17, 4, 12])},
        (np.arange(SIZE)[:, None] < np.array([9, 17, 3])[:, None, None, None])
        & (np.arange(SIZE) < np.array([17, 4, 12])[:, None, None, None]),
    ),
    "left padding": (
        {"mask": (np.arange(SIZE) >= np.array([4, 0, 7])[:, None])[:, None, None], "is_causal": True},
        CAUSAL & (np.arange(SIZE) >= np.array([4, 0, 7])[:, None])[:, None, None],
    ),
}


@pytest.mark.parametrize(("options", "mask"), OPTIONS.values(), ids=OPTIONS)
def test_segments(platform, options, mask):
    operands = tensors(rows=SIZE, keys=SIZE)
    check(operands, ALONE, mask_of(ALONE, ALONE) & mask, **options)
    check(operands, (ALONE, ALONE), mask_of(ALONE, ALONE) & mask, traced=False, **options)
    check(operands, WITH_PADDING, mask_of(WITH_PADDING, WITH_PADDING, 0) & mask, padding_segment_id=0, **options)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64])
def test_ids_of_any_integer_dtype(platform, dtype):
    operands, ids = tensors(rows=SIZE, keys=SIZE), np.stack([runs((200 % 128, 8), (1, 9))] * 3).astype(dtype)
    check(operands, ids, mask_of(ids, ids), padding_segment_id=-1 if dtype == np.uint8 else None)


def test_scores_and_a_row_without_a_batch(platform):
    operands = tensors(rows=SIZE, keys=SIZE)
    mask = mask_of(ALONE, ALONE) & CAUSAL
    oracle = {"sinks": np.linspace(-1, 2, 6, dtype=np.float32), "softcap": 1.5, "scale": 0.3}
    check(operands, ALONE, mask, is_causal=True, oracle=oracle)
    out, residual = dot_product_attention(*(x[1] for x in operands), segment_ids=ALONE[1], return_residual=True)
    expected = dense_attention(*operands, mask_of(ALONE, ALONE))
    np.testing.assert_allclose(out, expected[0][1], atol=3e-5)
    np.testing.assert_allclose(residual, expected[1][1], atol=3e-5)


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 17, 100])
def test_more_segments_than_the_bound_give_nan(platform, bound):
    operands = tensors(rows=SIZE, keys=SIZE)
    ids = np.stack([PADDED["everywhere"], ROWS["one"], PADDED["after"]])
    call = functools.partial(
        dot_product_attention, *operands, padding_segment_id=0, max_segments=bound, return_residual=True
    )
    out, residual = jax.jit(lambda ids: call(segment_ids=ids))(ids)
    expected = dense_attention(*operands, mask_of(ids, ids, 0))
    for i, count in enumerate((3, 1, 2)):
        if count > bound:
            assert np.isnan(out[i]).all() and np.isnan(residual[i]).all()
        else:
            np.testing.assert_allclose(out[i], expected[0][i], atol=3e-5)
            np.testing.assert_allclose(residual[i], expected[1][i], atol=3e-5)


def test_equal_ids_that_are_not_adjacent(platform):
    operands = tensors(rows=SIZE, keys=SIZE)
    ids = np.stack([runs((1, 5), (2, 4), (1, 8)), ROWS["any order"], PADDED["everywhere"]])
    for padding, invalid in ((None, [0, 2]), (0, [0])):
        call = functools.partial(dot_product_attention, is_causal=True, padding_segment_id=padding)
        traced = jax.jit(lambda ids, *x, call=call: call(*x, segment_ids=ids))
        out = traced(ids, *operands)
        assert [i for i in range(3) if np.isnan(out[i]).all()] == invalid
        mask = mask_of(ids, ids, padding) & CAUSAL
        valid = np.delete(np.arange(3), invalid)
        np.testing.assert_allclose(out[valid], dense_attention(*operands, mask)[0][valid], atol=3e-5)
        gradient = jax.grad(lambda q, ids, traced=traced: traced(ids, q, *operands[1:]).sum())(operands[0], ids)
        assert [i for i in range(3) if np.isnan(gradient[i]).any()] == invalid
        # The values of NumPy arrays are known.
        with pytest.raises(ValueError, match=r"dot_product_attention: segment_ids\[0\] has equal ids that are not adj"):
            call(*operands, segment_ids=ids)


PAIRS = {
    "same": (runs((1, 5), (2, 4), (3, 8)), runs((1, 3), (2, 20), (3, 6))),
    "some": (runs((1, 5), (2, 4), (3, 8)), runs((8, 3), (1, 7), (5, 1), (3, 18))),
    "none": (runs((1, 5), (2, 12)), runs((8, 9), (7, 20))),
    "others twice": (runs((1, 5), (2, 12)), runs((8, 4), (1, 9), (8, 16))),
    "queries without keys twice": (runs((4, 5), (2, 4), (4, 8)), runs((8, 4), (2, 25))),
    "padding": (runs((0, 5), (2, 12)), runs((0, 9), (2, 12), (0, 8))),
}


@pytest.mark.parametrize(("queries", "keys"), PAIRS.values(), ids=PAIRS)
def test_pairs(platform, queries, keys):
    pair = tuple(np.stack([x, np.zeros_like(x), x + 1]) for x in (queries, keys))
    has_padding = 0 in queries
    mask = mask_of(*pair, 0 if has_padding else None)
    if has_padding:  # where padding has another id, it occurs twice
        pair, mask = tuple(x[:2] for x in pair), mask[:2]
    operands = [x[: len(mask)] for x in tensors()]
    options = {"padding_segment_id": 0} if has_padding else {}
    check(operands, pair, mask, **options)
    check(operands, pair, mask, oracle={"sinks": np.linspace(-1, 2, 6, dtype=np.float32)}, **options) if (
        not has_padding
    ) else None


def spans(ids, padding):
    """The runs of ids other than padding, in order."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    return [(ids[a], a, b) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True) if ids[a] != padding]


def is_valid(queries, keys, padding, bound):
    """The conditions of docs/dot_product_attention.md#segment-ids."""
    segments = spans(queries, padding)
    if keys is queries:
        return len({i for i, _, _ in segments}) == len(segments) <= bound
    ranges = [[(a, b) for j, a, b in spans(keys, padding) if j == i] for i, _, _ in segments]
    ranges = [x for x in ranges if x]
    single = all(len(x) == 1 for x in ranges)
    return len(segments) <= bound and single and all(a[0][1] <= b[0][0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("padding", "bound", "pair"),
    [
        (None, 17, True),
        (0, 3, False),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in itertools.product([None, 0], [17, 3], [False, True])
            if x not in ((None, 17, True), (0, 3, False))
        ),
    ],
)
def test_random_ids(padding, bound, pair):
    """Many entries of a batch with random runs: each is the oracle's, or NaN where it has to be."""
    rng, batch = np.random.default_rng(bound), 300

    def random_ids(size):
        rows = []
        for _ in range(batch):
            kind = rng.random()
            values = rng.permutation(4) if kind < 0.3 else rng.integers(0, 5, 4)
            values = np.sort(values) if kind > 0.6 else values
            lengths = rng.multinomial(size, rng.dirichlet(np.ones(4)))
            rows.append(np.repeat(values, lengths))
        return np.stack(rows)

    queries = random_ids(17)
    keys = random_ids(29) if pair else queries
    q, k, v = tensors(batch=batch, heads=(1, 1), d=8, keys=keys.shape[1])
    ids = tuple(map(jnp.asarray, (queries, keys))) if pair else jnp.asarray(queries)
    out, residual = dot_product_attention(
        q, k, v, segment_ids=ids, padding_segment_id=padding, max_segments=bound, return_residual=True
    )
    rows = [(a, b if pair else a) for a, b in zip(queries, keys, strict=True)]
    valid = np.array([is_valid(*row, padding, bound) for row in rows])
    assert 5 < valid.sum() < batch - 5
    expected = dense_attention(q, k, v, mask_of(queries, keys, padding))
    for actual, wanted in zip((out, residual), expected, strict=True):
        np.testing.assert_allclose(actual[valid], wanted[valid], atol=3e-5, rtol=3e-5)
        assert np.isnan(actual[~valid]).all()


INVALID_PAIRS = {
    "keys twice": (runs((1, 9), (2, 8)), runs((1, 3), (2, 20), (1, 6))),
    "queries twice": (runs((1, 9), (2, 4), (1, 4)), runs((1, 3), (2, 26))),
    "another order": (runs((1, 9), (2, 8)), runs((2, 3), (1, 26))),
}


@pytest.mark.parametrize(("queries", "keys"), INVALID_PAIRS.values(), ids=INVALID_PAIRS)
def test_pairs_that_are_not_ranges_in_order(platform, queries, keys):
    valid = PAIRS["some"]
    pair = tuple(jnp.stack([jnp.asarray(x) for x in side]) for side in zip(valid, (queries, keys), valid, strict=True))
    out, residual = dot_product_attention(*tensors(), segment_ids=pair, return_residual=True)
    assert np.isnan(out[1]).all() and np.isnan(residual[1]).all()
    expected = dense_attention(*tensors(), mask_of(*map(np.asarray, pair)))
    for actual, wanted in zip((out, residual), expected, strict=True):
        np.testing.assert_allclose(np.delete(actual, 1, 0), np.delete(wanted, 1, 0), atol=3e-5)


PAIR_OFFSET = np.arange(29)[None] - np.arange(17)[:, None]
BESIDE = {
    "causal": ({"is_causal": True}, PAIR_OFFSET <= 0),
    "window": ({"local_window_size": 3}, abs(PAIR_OFFSET) <= 3),
    "ends": ({"k_end": np.full((3, 17), 11)}, np.arange(29) < 11),
    "prefix": ({"mask": (PAIR_OFFSET <= 0) | (np.arange(29) < 4)}, (PAIR_OFFSET <= 0) | (np.arange(29) < 4)),
}


@pytest.mark.parametrize(("options", "other"), BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("name", ["some", "padding", "another order"])
def test_a_pair_joins_masks_by_position(platform, options, other, name):
    pair = tuple(np.stack([x] * 3) for x in (PAIRS | INVALID_PAIRS)[name])
    padding = 0 if name == "padding" else None
    if padding is not None:
        options = {"padding_segment_id": padding, "sinks": jnp.linspace(-1, 2, 6), **options}
    mask, operands = mask_of(*pair, padding) & other, tensors()
    expected = dense_attention(*operands, mask, sinks=None if padding is None else np.linspace(-1, 2, 6))
    is_padding = np.zeros((3, 17), bool) if padding is None else pair[0] == padding
    for ids in (pair, tuple(map(jnp.asarray, pair))):
        call = jax.jit(lambda ids, *x: dot_product_attention(*x, segment_ids=ids, return_residual=True, **options))
        out, residual = (
            call(ids, *operands)
            if ids is not pair
            else dot_product_attention(*operands, segment_ids=pair, return_residual=True, **options)
        )
        np.testing.assert_allclose(out, np.where(is_padding[..., None, None], 0, expected[0]), atol=3e-5)
        np.testing.assert_allclose(residual, np.where(is_padding[..., None], -np.inf, expected[1]), atol=3e-5)


def test_a_pair_with_keys_of_an_id_that_are_not_adjacent_gives_nan_beside_other_masks():
    broken = tuple(
        np.stack(side) for side in zip(PAIRS["some"], INVALID_PAIRS["keys twice"], PAIRS["some"], strict=True)
    )
    out = dot_product_attention(*tensors(), segment_ids=tuple(map(jnp.asarray, broken)), is_causal=True)
    assert [bool(np.isnan(x).any()) for x in out] == [False, True, False]
    with pytest.raises(ValueError, match=r"segment_ids\[1\] has keys of one id that are not adjacent"):
        dot_product_attention(*tensors(), segment_ids=broken, is_causal=True)


def test_segments_of_one_array_join_bounds_of_each_query(platform):
    ids = np.stack([runs((1, 5), (2, 7), (3, 5))] * 3)
    ends = np.random.default_rng(3).integers(0, 21, (3, SIZE))
    operands = tensors(rows=SIZE, keys=SIZE)
    out = dot_product_attention(*operands, segment_ids=jnp.asarray(ids), k_end=jnp.asarray(ends), is_causal=True)
    offset = np.arange(SIZE)[None] - np.arange(SIZE)[:, None]
    mask = mask_of(ids, ids) & (offset <= 0) & (np.arange(SIZE) < ends[:, :, None])[:, None]
    np.testing.assert_allclose(out, dense_attention(*operands, mask)[0], atol=3e-5)


def test_jax_computes_segments_of_any_ids():
    operands = tensors(rows=SIZE, keys=SIZE)
    ids = np.random.default_rng(0).integers(0, 3, (3, SIZE))
    out = dot_product_attention(*operands, segment_ids=ids, padding_segment_id=0, implementation="xla")
    np.testing.assert_allclose(out, dense_attention(*operands, mask_of(ids, ids, 0))[0], atol=3e-5)


CASES = {
    "one array": (WITH_PADDING, WITH_PADDING, {"is_causal": True, "padding_segment_id": 0}),
    "bound": (ALONE, ALONE, {"local_window_size": 4, "max_segments": 4}),
    "pair": (*(np.stack([x] * 3) for x in (PAIRS["some"][0], PAIRS["some"][1])), {}),
}


@pytest.mark.parametrize(("queries", "keys", "options"), CASES.values(), ids=CASES)
def test_segments_have_gradients_and_vmap(platform, queries, keys, options):
    operands = tensors(rows=SIZE, keys=keys.shape[1])
    ids = queries if keys is queries else (queries, keys)
    mask = mask_of(queries, keys, options.get("padding_segment_id"))
    in_window = np.tril(np.ones_like(mask)) if "is_causal" in options else np.ones_like(mask)
    if "local_window_size" in options:
        in_window = abs(OFFSET) <= 4
    mask = mask & in_window

    def total(attend, *operands):
        out = jnp.where(mask.any(-1)[:, 0, :, None, None], jnp.sin(attend(*operands)), 0)
        return jnp.sum(out)

    with jax.default_matmul_precision("highest"):
        reference = functools.partial(total, functools.partial(jax.nn.dot_product_attention, mask=mask))
        expected = jax.grad(reference, (0, 1, 2))(*operands)

    def gradients(ids, *operands):
        ours = functools.partial(dot_product_attention, segment_ids=ids, **options)
        return jax.grad(functools.partial(total, ours), (0, 1, 2))(*operands)

    for a, b in zip(jax.jit(gradients)(ids, *operands), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)

    stacked = jax.tree.map(lambda x: np.stack([x, x[::-1]]), ids)
    many = [jnp.stack([x, 2 * x]) for x in operands]
    call = functools.partial(dot_product_attention, **options)
    together = jax.jit(jax.vmap(lambda ids, *x: call(*x, segment_ids=ids)))(stacked, *many)
    for i, step in enumerate((1, -1)):
        wanted = dense_attention(*(x[i] for x in many), mask[::step])[0]
        np.testing.assert_allclose(together[i], wanted, atol=3e-5, rtol=3e-5)
    lowered = jax.jit(jax.vmap(lambda ids, *x: call(*x, segment_ids=ids))).lower(stacked, *many).as_text()
    assert lowered.count("custom_call @xla_gpu_") == 1


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 0), (2, 5, 0), (2, 0, 5)])
def test_empty_operands(platform, batch, rows, keys):
    operands = tensors(batch=batch, rows=rows, keys=keys)
    pair = tuple(jnp.zeros((batch, size), int) for size in (rows, keys))
    mask = jnp.ones((batch, 1, rows, keys), bool)
    for options in ({"segment_ids": pair}, {"mask": mask}):
        assert (dot_product_attention(*operands, **options) == 0).all()
    out = jax.jit(lambda mask: dot_product_attention(*operands, mask=mask, mask_form="causal"))(mask)
    assert out.shape == (batch, rows, 6, 32) and (out == 0).all()
    of_keys = jax.jit(lambda mask: dot_product_attention(*operands, mask=mask))(jnp.ones((batch, 1, 1, keys), bool))
    assert (of_keys == 0).all()
    if rows == keys:
        assert dot_product_attention(*operands, segment_ids=pair[0], is_causal=True).shape == out.shape


IDS = np.zeros((3, SIZE), int)
REJECTED = {
    "shape": ({"segment_ids": IDS[:2]}, ValueError, "segment_ids has shape [2, 17], expected [3, 17]"),
    "floats": ({"segment_ids": IDS + 0.5}, TypeError, "segment_ids has dtype float64, expected integers"),
    "three": ({"segment_ids": (IDS, IDS, IDS)}, ValueError, "segment_ids has 3 entries, expected one array, or a pair"),
    "64 bits": ({"segment_ids": IDS + 2**40}, ValueError, "segment_ids has the id 1099511627776"),
    "dtypes": (
        {"segment_ids": (jnp.asarray(IDS, "uint32"), jnp.asarray(IDS, "int32"))},
        TypeError,
        "segment_ids are uint32 and int32, which have no common dtype of 32 bits",
    ),
    "padding alone": ({"padding_segment_id": 0}, ValueError, "padding_segment_id or max_segments is given, and there"),
    "bound alone": ({"max_segments": 3}, ValueError, "padding_segment_id or max_segments is given, and there are"),
    "bound": ({"segment_ids": IDS, "max_segments": 0}, ValueError, "max_segments is 0, expected >= 1"),
    "padding": ({"segment_ids": IDS, "padding_segment_id": 0.5}, TypeError, "padding_segment_id is 0.5, expected an"),
}


@pytest.mark.parametrize(("options", "error", "text"), REJECTED.values(), ids=REJECTED)
def test_errors(options, error, text):
    with pytest.raises(error) as caught:
        dot_product_attention(*tensors(rows=SIZE, keys=SIZE), **options)
    assert str(caught.value).startswith(f"dot_product_attention: {text}")


def test_one_array_needs_as_many_queries_as_keys():
    with pytest.raises(ValueError, match="segment_ids is one array, expected a pair: there are 17 queries, 29 keys"):
        dot_product_attention(*tensors(), segment_ids=IDS)
