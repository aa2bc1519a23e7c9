"""The NumPy reference against values computed by hand; the calls of calls.py hold it against the library."""

import numpy as np
import pytest

from batches import batch
from oracle import (
    Score,
    assert_close_like_naive,
    assert_lse_close,
    assert_paged_attention,
    attend,
    clamped_rows,
    kv_cache_update_reference,
    kv_cache_update_split_reference,
    paged_attention_reference,
    visible,
)


def test_two_keys_are_weighed_by_their_scores():
    # Scores 0.5 * (2 * 1, 2 * 0) = (1, 0).
    q, k, v = np.array([[2.0]]), np.array([[1.0], [0.0]]), np.array([[10.0], [20.0]])
    out, lse = attend(q, k, v, np.ones((1, 2), bool), Score(0.5), np.zeros(1))
    e = np.e
    np.testing.assert_allclose(out, [[(10 * e + 20) / (e + 1)]])
    np.testing.assert_allclose(lse, [np.log(e + 1)])


def test_the_soft_cap_bends_scores_before_the_softmax():
    q, k = np.array([[6.0]]), np.array([[1.0], [0.0]])
    out, lse = attend(q, k, k, np.ones((1, 2), bool), Score(1.0, softcap=2.0), np.zeros(1))
    capped = 2 * np.tanh(3.0)
    np.testing.assert_allclose(lse, [np.log(np.exp(capped) + 1)])
    np.testing.assert_allclose(out, [[1 / (1 + np.exp(-capped))]])


def test_keys_that_nobody_sees_may_hold_anything():
    k = v = np.array([[np.nan], [1.0], [np.inf]])
    out, lse = attend(np.ones((1, 1)), k, v, np.array([[False, True, False]]), Score(1.0), np.zeros(1))
    np.testing.assert_allclose(out, [[1.0]])
    np.testing.assert_allclose(lse, [1.0])


@pytest.mark.parametrize(
    ("len_q", "len_k", "window_left", "window_right", "wanted"),
    [
        (2, 3, -1, 0, [[1, 1, 0], [1, 1, 1]]),
        (2, 3, 0, 0, [[0, 1, 0], [0, 0, 1]]),
        (2, 3, 1, 0, [[1, 1, 0], [0, 1, 1]]),
        (3, 2, -1, 0, [[0, 0], [1, 0], [1, 1]]),
        (2, 3, -1, -1, [[1, 1, 1], [1, 1, 1]]),
        (2, 3, 0, 1, [[0, 1, 1], [0, 0, 1]]),
        (2, 0, -1, 0, [[], []]),
    ],
)
def test_which_keys_a_query_sees(len_q, len_k, window_left, window_right, wanted):
    seen = visible(len_q, len_k, window_left, window_right)
    np.testing.assert_array_equal(seen, np.array(wanted, bool).reshape(len_q, len_k))


def test_queries_may_stand_at_the_first_keys_and_padding_is_hidden():
    np.testing.assert_array_equal(visible(2, 3, -1, 0, top_left=True), [[1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(visible(2, 3, -1, 0, leftpad=1), [[0, 1, 0], [0, 1, 1]])
    np.testing.assert_array_equal(visible(1, 2, leftpad=2), [[0, 0]])


def test_a_slope_is_paid_for_each_key_of_distance():
    # The query stands at key 1: distances 1 and 0, logits -0.5 and 0.
    q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[10.0], [20.0]])
    out, lse = attend(q, k, v, np.ones((1, 2), bool), Score(1.0, slope=0.5), np.array([1]))
    weight = np.exp(-0.5)
    np.testing.assert_allclose(out, [[(10 * weight + 20) / (weight + 1)]])
    np.testing.assert_allclose(lse, [np.log(weight + 1)])


def test_a_sink_takes_weight_and_gives_nothing():
    q, k, v = np.zeros((2, 1)), np.zeros((1, 1)), np.array([[10.0]])
    out, lse = attend(q, k, v, np.array([[True], [False]]), Score(1.0, sink=np.log(3.0), v_scale=2.0), np.zeros(2))
    np.testing.assert_allclose(out, [[2 * 10 / 4], [0]])
    np.testing.assert_allclose(lse, [np.log(4.0), np.log(3.0)])


def test_starts_are_read_as_their_running_maximum_within_the_rows():
    low, high = -(2**31), 2**31 - 1
    starts = [low, 4, high, 2, 5]
    assert [clamped_rows(starts, b, 10) for b in range(4)] == [(0, 4), (4, 10), (10, 10), (10, 10)]
    assert [clamped_rows([0, 6, 4, 8], b, 10) for b in range(3)] == [(0, 6), (6, 6), (6, 8)]


def test_lengths_and_counts_are_clamped():
    query, cache, lens, tables, starts, _ = batch([(1, 9), (6, 6)])
    for num_seqs, used in ((2**31 - 1, 2), (-1, 0), (1, 1)):
        _, lse = paged_attention_reference(query, np.nan_to_num(cache), lens, tables, starts, num_seqs, scale=1.0)
        assert np.isfinite(lse[0]).sum() == (0, 1, 7)[used]
    for first in (-5, 0):
        lens[0] = first
        _, lse = paged_attention_reference(query, cache, lens, tables, starts, 2, scale=1.0)
        assert np.isfinite(lse[0]).sum() == 6


def test_the_comparison_fails_for_what_is_off():
    operands = batch([(5, 40), (2, 0)])
    out, lse = paged_attention_reference(*operands, scale=0.25)
    assert_paged_attention(out, lse, *operands, scale=0.25)
    for change in [(0, 1, 2, 1e-4), (0, 1, 2, np.nan), (5, 0, 0, 1e-9)]:
        wrong = out.copy()
        wrong[change[:3]] += change[3]
        with pytest.raises(AssertionError):
            assert_paged_attention(wrong, lse, *operands, scale=0.25)
    for change in [(0, 1, 1e-3), (0, 1, np.nan), (0, 6, np.nan)]:
        wrong = lse.copy()
        wrong[change[:2]] += change[2]
        with pytest.raises(AssertionError):
            assert_paged_attention(out, wrong, *operands, scale=0.25)
    with pytest.raises(AssertionError):
        assert_paged_attention(out, lse, *operands, scale=0.26)
    with pytest.raises(AssertionError):
        assert_lse_close(np.array([0.0]), np.array([-np.inf]))
    with pytest.raises(AssertionError):
        assert_close_like_naive(np.zeros((2, 1)), np.zeros((1, 2)), np.zeros((1, 2)))


@pytest.mark.parametrize(
    ("layout", "shape", "k_at", "v_at"),
    [
        (1, (3, 2, 4, 8), np.s_[2, 1, 0::2], np.s_[2, 1, 1::2]),
        (2, (2, 3, 2, 2, 8), np.s_[0, 2, 1], np.s_[1, 2, 1]),
        (3, (3, 2, 2, 2, 8), np.s_[2, 0, 1], np.s_[2, 1, 1]),
    ],
)
def test_rows_go_to_their_slot_and_nowhere_else(layout, shape, k_at, v_at):
    cache = np.zeros(shape, np.float32)
    key, value = np.ones((3, 2, 8), np.float32), np.full((3, 2, 8), 2, np.float32)
    # Slot 5 is page 2, token 1; the others lie outside.
    after = kv_cache_update_reference(cache, key, value, np.array([5, -1, 6]), kv_layout=layout)
    wanted = np.zeros(shape, np.float32)
    wanted[k_at], wanted[v_at] = 1, 2
    np.testing.assert_array_equal(after, wanted)
    assert (cache == 0).all()


def test_rows_are_divided_by_the_scale_of_their_head():
    caches = np.zeros((1, 1, 2, 8), np.float16), np.zeros((1, 1, 2, 16), np.float16)
    rows = np.full((1, 2, 8), 3, np.float16), np.full((1, 2, 16), 3, np.float16)
    k, v = kv_cache_update_split_reference(*caches, *rows, [0], k_scale=[2.0], v_scale=[1.5, 0.5])
    assert k.dtype == np.float16 and (k == 1.5).all()
    np.testing.assert_array_equal(v[0, 0, :, 0], [2, 6])
