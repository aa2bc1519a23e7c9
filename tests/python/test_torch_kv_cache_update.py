"""The operators of torch that write rows into a cache, and simple_add and merge_attention_states, on every device."""

import numpy as np
import pytest

import xla_attention.torch as xt
from oracle import kv_cache_update_reference, kv_cache_update_split_reference, rotated
from torch_side import array, tensor, torch

SLOTS = [5, 0, -1, 30, 31, 32, 100, -(2**31)]


def rows(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cache_of(kv_layout, *, pages=8, page_size=4, heads=2, d=16):
    shape = {
        "interleaved": (pages, page_size, 2 * heads, d),
        "stacked": (2, pages, page_size, heads, d),
        "per_page": (pages, 2, page_size, heads, d),
    }
    return rows(*shape[kv_layout], seed=1)


def test_keys_and_values_may_lie_apart(torch_device):
    caches = [rows(8, 4, 2, d, seed=d) for d in (16, 24)]
    key, value = rows(8, 2, 16), rows(8, 2, 24)
    wanted = kv_cache_update_split_reference(*caches, key, value, SLOTS)
    old = [tensor(x, torch_device) for x in caches]
    new = [tensor(x, torch_device) for x in (key, value, np.int32(SLOTS))]
    for found, right in zip(xt.kv_cache_update(tuple(old), *new), wanted, strict=True):
        np.testing.assert_array_equal(array(found), right)
    xt.update_cache_(tuple(old), *new)
    for found, right in zip(old, wanted, strict=True):
        np.testing.assert_array_equal(array(found), right)
    with pytest.raises(ValueError, match="kv_layout is 'stacked', which K and V apart do not have"):
        xt.update_cache_(tuple(old), *new, kv_layout="stacked")


def test_rows_may_be_slices_of_a_wider_tensor(torch_device):
    """As after one projection to q, k and v."""
    both = rows(8, 4, 16)
    wanted = kv_cache_update_reference(cache_of("interleaved"), both[:, :2], both[:, 2:], SLOTS)
    both, cache, slots = (tensor(x, torch_device) for x in (both, cache_of("interleaved"), np.int32(SLOTS)))
    found = xt.kv_cache_update(cache, both[:, :2], both[:, 2:], slots)
    np.testing.assert_array_equal(array(found), wanted)


def test_a_slice_of_a_cache_is_written_in_place():
    stored = tensor(rows(2, 8, 4, 4, 16))
    before = stored.clone()
    key, value, slots = (tensor(x) for x in (rows(8, 2, 16), rows(8, 2, 16, seed=2), np.int32(SLOTS)))
    xt.update_cache_(stored[:, ::2][1], key, value, slots)
    before[1, ::2] = xt.kv_cache_update(before[1, ::2].contiguous(), key, value, slots)
    assert torch.equal(stored, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_are_rotated_on_the_way(torch_device, interleaved):
    query, key, value = rows(8, 6, 16), rows(8, 2, 16, seed=1), rows(8, 2, 16, seed=2)
    positions = np.int32([0, 1, 2, 3, 9, 4, 50, -1])
    angles = np.arange(10)[:, None] * np.float32([1.0, 0.1, 0.01])
    cos_sin = np.float32(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    turned = [rotated(x, positions, cos_sin, interleaved) for x in (query, key)]
    cache = cache_of("interleaved")
    wanted = kv_cache_update_reference(cache, np.float32(turned[1]), value, SLOTS)
    operands = [tensor(x, torch_device) for x in (cache, query, key, value, np.int32(SLOTS), positions, cos_sin)]
    found_query, found = xt.rope_kv_cache_update(*operands, interleaved=interleaved)
    np.testing.assert_allclose(array(found_query), turned[0], atol=1e-6)
    np.testing.assert_allclose(array(found), wanted, atol=1e-6)
    np.testing.assert_array_equal(array(operands[0]), cache)
    if torch_device != "xla":
        assert torch.equal(torch.ops.xla_gpu.rope_kv_cache_update_(*operands, interleaved), found_query)
        assert torch.equal(operands[0], found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_simple_add(torch_device, dtype, shape):
    a, b = (torch.randint(-9, 9, shape).to(dtype).to(torch_device) for _ in range(2))
    assert torch.equal(xt.simple_add(a, b).cpu(), (a + b).cpu())
    if dtype.is_floating_point:
        gradients = torch.autograd.grad(xt.simple_add(a.requires_grad_(), b).sum(), a)
        assert torch.equal(gradients[0].cpu(), torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_a_compiled_step_updates_the_cache_in_place(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    cache, key, value = cache_of("interleaved"), rows(8, 2, 16), rows(8, 2, 16, seed=2)
    wanted = kv_cache_update_reference(cache, key, value, SLOTS)
    operands = [tensor(x, device) for x in (cache, key, value, np.int32(SLOTS))]

    def step(cache, key, value, slots):
        xt.update_cache_(cache, key, value, slots)
        return cache.sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        found = compiled(*operands)
        np.testing.assert_array_equal(array(operands[0]), wanted)
        np.testing.assert_allclose(array(found), wanted.sum(), rtol=1e-4, atol=1e-3)


def test_torch_checks_the_operators():
    cache, key, value, slots = (
        tensor(x) for x in (cache_of("interleaved"), rows(3, 2, 16), rows(3, 2, 16), [1, 7, -1])
    )
    slots = torch.tensor(slots)
    ops = torch.ops.xla_gpu
    k_cache, v_cache = (tensor(rows(8, 4, 2, 16)) for _ in range(2))
    rope = (cache, key, key, value, slots, slots, torch.ones(4, 8))
    states = (tensor(rows(3, 2, 8)), tensor(rows(2, 3))) * 2
    for op, arguments in (
        (ops.kv_cache_update, (cache, key, value, slots)),
        (ops.kv_cache_update_, (cache, key, value, slots)),
        (ops.kv_cache_update_split, (k_cache, v_cache, key, value, slots)),
        (ops.kv_cache_update_split_, (k_cache, v_cache, key, value, slots)),
        (ops.rope_kv_cache_update, rope),
        (ops.rope_kv_cache_update_, rope),
        (ops.merge_attention_states, states),
        (ops.simple_add, (key, value)),
        (ops.simple_add, (key.clone().requires_grad_(), value)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_mistakes_are_refused_before_anything_runs(torch_device):
    cache, key, value = (tensor(x, torch_device) for x in (cache_of("interleaved"), rows(8, 2, 16), rows(8, 2, 16)))
    slots = torch.zeros(8, device=torch_device)
    with pytest.raises(TypeError, match="slot_mapping has dtype torch.float32, expected integers"):
        xt.kv_cache_update(cache, key, value, slots)
    with pytest.raises(ValueError, match="value has shape"):
        xt.kv_cache_update(cache, key, value[..., :8], slots.int())
    with pytest.raises(ValueError, match="b has shape"):
        xt.simple_add(key, value[:3])
    with pytest.raises(ValueError, match=r"b is on meta, a on .*; expected all on one device"):
        xt.simple_add(key, value.to("meta"))
