"""Every call of calls.py through torch: its results, strides, in-place updates, compilation, and the HLO."""

import numpy as np
import pytest
import torch

import xla_attention.torch as xt
from calls import ATTRIBUTE_ONLY, bits, every_call, flatten, plain_calls
from torch_adapter import IN_PLACE, array, tensor_arguments

PLAIN = plain_calls()
UPDATES = [name for name, call in PLAIN.items() if call.updates]
OPS = torch.ops.xla_gpu
each_plain = pytest.mark.parametrize("name", PLAIN)


def run(call, operands):
    return flatten(getattr(xt, call.function)(**operands))


def assert_equal(actual, expected):
    for result, expected_result in zip(map(array, actual), map(array, expected), strict=True):
        assert (result.dtype, result.shape) == (expected_result.dtype, expected_result.shape)
        np.testing.assert_array_equal(bits(result), bits(expected_result))


def with_tensors(operands, function, dimensions):
    """The operands, with a function applied to tensors of these numbers of dimensions, and to pairs of them."""

    def changed(x):
        if isinstance(x, tuple):
            return tuple(map(changed, x))
        return function(x) if isinstance(x, torch.Tensor) and x.dim() in dimensions else x

    return {name: changed(x) for name, x in operands.items()}


@pytest.mark.parametrize("name", every_call())
def test_results_are_those_of_the_c_interface(torch_device, name):
    call = every_call()[name]
    operands = tensor_arguments(call, torch_device)
    actual = run(call, operands)
    assert {x.device.type for x in actual} == {torch_device}
    call.check(*map(array, actual))
    if call.updates is None:
        return
    kept = call.updated(tensor_arguments(call))
    assert_equal(call.updated(operands), kept)  # the arguments are not modified
    if call.function == "rope_kv_cache_update" and torch_device == "xla":
        return  # which supports no operator that mutates its operands
    others = flatten(IN_PLACE[call.function](**operands))
    call.check(*map(array, (*others, *call.updated(operands))))


@each_plain
def test_operands_may_be_transposed_and_sliced(torch_device, name):
    call = PLAIN[name]
    operands = tensor_arguments(call, torch_device)
    expected = run(call, operands)

    def transposed(x):
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)

    changes = (
        lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],  # strided rows, which are not copied
        lambda x: torch.stack([x, x], dim=1)[:, 1],
        transposed,
    )
    for change in changes:
        assert_equal(run(call, with_tensors(operands, change, (2, 3, 4, 5))), expected)


@pytest.mark.parametrize("name", UPDATES)
def test_a_slice_of_a_cache_is_written_in_place(name):
    call = PLAIN[name]
    operands = tensor_arguments(call)
    expected = run(call, operands)
    caches = flatten(operands[call.updates])
    stored = [torch.stack([cache, torch.zeros_like(cache)], dim=1) for cache in caches]
    slices = [x[:, 0] for x in stored]
    others = flatten(IN_PLACE[call.function](**operands | {call.updates: slices if len(slices) > 1 else slices[0]}))
    assert_equal([*others, *(x.contiguous() for x in slices)], expected)
    assert not any(x[:, 1].any() for x in stored)


def layer(query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, key, value, slot_mapping):
    """Calls that update and read a cache, which a compiler has to keep in order."""
    sequences = context_lens, block_tables, query_start_loc, num_seqs
    out = xt.paged_attention_update_(query, kv_cache, *sequences, key, value, slot_mapping, scale=0.125)
    xt.update_cache_(kv_cache, value, key, slot_mapping)
    between = xt.paged_attention(query, kv_cache, *sequences, scale=0.125)
    xt.update_cache_(kv_cache, key, value, slot_mapping)
    return out, between, xt.paged_attention(query, kv_cache, *sequences, scale=0.125)


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_a_compiled_layer_is_one_graph_and_updates_its_cache_in_place(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    call = PLAIN["paged_attention_update: plain"]
    wanted_of, found_of = (dict(list(tensor_arguments(call, device).items())[:9]) for _ in range(2))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        actual, expected = compiled(**found_of), layer(**wanted_of)
        assert not torch.equal(actual[0].cpu(), actual[1].cpu())
        assert_equal([*actual, found_of["kv_cache"]], [*expected, wanted_of["kv_cache"]])
        torch.testing.assert_close(actual[0].cpu(), actual[2].cpu(), atol=1e-5, rtol=1e-5)


@each_plain
def test_a_function_compiles_in_one_graph(name, xla_device):
    call = PLAIN[name]
    for backend, device in (("openxla", xla_device), ("aot_eager", "cpu")):
        operands = tensor_arguments(call, device)
        torch._dynamo.reset()  # otherwise each call counts as a recompilation
        function = torch.compile(getattr(xt, call.function), backend=backend, fullgraph=True)
        call.check(*map(array, flatten(function(**operands))))


@each_plain
def test_the_program_has_the_target_with_layouts_and_aliasing(name, xla_device):
    import _XLAC

    call = PLAIN[name]
    actual = run(call, tensor_arguments(call, xla_device))
    (line,) = [line for line in _XLAC._get_xla_tensors_hlo(actual).splitlines() if " custom-call(" in line]
    assert f'custom_call_target="xla_gpu_{call.function}' in line
    assert "api_version=API_VERSION_TYPED_FFI" in line and "operand_layout_constraints={" in line
    assert ("output_to_operand_aliasing=" in line) == (call.updates is not None)


@pytest.mark.parametrize(("name", "options", "attribute"), ATTRIBUTE_ONLY)
def test_options_that_change_no_result_are_in_the_program(name, options, attribute, xla_device):
    import _XLAC

    call = PLAIN[name]
    assert attribute in _XLAC._get_xla_tensors_hlo(run(call, tensor_arguments(call, xla_device) | options))


def operators_of(call, operands):
    """The torch.library operators that a function calls, and their arguments by name."""
    returns_lse = operands.pop("return_lse", False) and call.function != "flash_attn_varlen"
    cache = operands.get("kv_cache")
    split = dict(zip(("k_cache", "v_cache"), cache, strict=True)) if isinstance(cache, tuple) else {}
    if call.function == "gather_kv_cache":
        split = split or {"k_cache": cache, "v_cache": cache.new_empty(0), "kv_layout": "interleaved"}
    elif call.function == "flash_attn_varlen":
        operands.update(max_seqlen_q=9, max_seqlen_k=40, softmax_scale=0.125, is_causal=True, softcap=0.0)
        operands.update(window_left=-1, window_right=-1, cu_seqlens_k=operands.get("cu_seqlens_k", torch.tensor([])))
        if operands["v"] is None:
            operands["v"] = operands["k"].new_empty(0)
        operands["cu_seqlens_k"] = operands["cu_seqlens_k"].int()
    operands |= split
    namespace = torch.ops.xla if call.function == "flash_attn_varlen" else OPS
    names = [f"{call.function}_split" if split and call.updates else call.function]
    if call.function == "flash_attn_varlen":
        names = ["flash_attn_varlen_op"]
    if call.updates and "kv_scale_cache" in operands:
        names = [f"{call.function}_scaled"]
    if returns_lse:
        names += [f"{name}_with_lse" for name in names]
    if call.updates:
        names += [f"{name}_" for name in names]
    for op in (getattr(namespace, name) for name in names):
        for overload in op.overloads():
            yield getattr(op, overload), operands | ({"num_seqs": 5} if overload == "int" else {})


def test_every_operator_passes_opcheck():
    """Without NaN in the operands, because opcheck would find NaN unequal."""
    checked = set()
    scaled = "paged_attention_update: scales bfloat16 int8 plain", "kv_cache_update: scales float32 int8 interleaved"
    for call in (*PLAIN.values(), *(every_call()[name] for name in scaled)):
        for op, arguments in operators_of(call, with_tensors(tensor_arguments(call), torch.nan_to_num, range(6))):
            torch.library.opcheck(op, [arguments.get(x.name, x.default_value) for x in op._schema.arguments])
            checked.add(op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else ""))
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("xla_gpu::")}
    gradients = {"xla_gpu::flash_attn_varlen_bwd", "xla_gpu::flash_attn_varlen_bias_bwd"}
    assert checked == ours - gradients | {"xla::flash_attn_varlen_op"}


def test_vllms_call_over_pages(torch_device):
    """vLLM passes `seqused_k`, `block_table`, and a dummy `cu_seqlens_k`, which is not read."""
    call = every_call()["flash_attn_varlen: pages"]
    operands = tensor_arguments(call, torch_device)
    dummy = torch.zeros(1, dtype=torch.int32, device=torch_device)
    actual = torch.ops.xla.flash_attn_varlen_op(
        *(operands[name] for name in ("q", "k", "v", "cu_seqlens_q")), dummy, 33, 100, 0.125, is_causal=True,
        window_left=-1, window_right=-1, softcap=0.0, seqused_k=operands["seqused_k"],
        block_table=operands["block_table"],
    )  # fmt: skip
    call.check(*map(array, actual))


@pytest.mark.parametrize("name", ["ragged_paged_attention", "xla_gpu_paged_attention"])
def test_another_name_of_paged_attention(torch_device, name):
    options = {"scale": 0.25, "sliding_window": 9}
    operands = tuple(tensor_arguments(PLAIN["paged_attention: plain"], torch_device).values())[:6]
    expected = xt.paged_attention(*operands, **options)
    if name == "ragged_paged_attention":
        options = {"sm_scale": 0.25, "sliding_window": 9, "num_kv_pages_per_block": 4}
    assert_equal([getattr(xt, name)(*operands, **options)], [expected])


@each_plain
def test_64_bit_integers_saturate(torch_device, name):
    """Slots that are too large become -1, other integers the nearest i32."""
    call = PLAIN[name]
    operands = with_tensors(tensor_arguments(call, torch_device), torch.nan_to_num, (3, 4, 5))
    integers = [name for name, x in operands.items() if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
    for operand in integers:
        narrow = operands[operand]
        far = -1 if operand == "slot_mapping" else 2**31 - 1
        wide = torch.where(narrow > 1, narrow.long() + 2**40, narrow.long())
        expected = run(call, operands | {operand: torch.where(narrow > 1, far, narrow)})
        assert_equal(run(call, operands | {operand: wide}), expected)


@pytest.mark.usefixtures("all_torch_devices")
def test_simple_add_has_a_gradient(torch_device):
    a, b = torch.ones(3, device=torch_device, requires_grad=True), torch.ones(3, device=torch_device)
    (actual,) = torch.autograd.grad(xt.simple_add(a, b).sum(), a)
    assert actual.cpu().tolist() == [1.0] * 3


@pytest.mark.parametrize("name", [name for name in PLAIN if not name.startswith(("simple_add", "flash"))])
@pytest.mark.usefixtures("all_torch_devices")
def test_an_unsupported_gradient_is_an_error_that_names_the_alternative(torch_device, name):
    call = PLAIN[name]
    operands = tensor_arguments(call, torch_device)
    operand = next(name for name in ("query", "key", "out_a", "kv_cache") if name in operands)
    flatten(operands[operand])[0].requires_grad_()
    result = next(x for x in run(call, operands) if x.requires_grad)
    text = (
        f"xla_gpu::{call.function}.*: its gradient is not built yet on {torch_device}.*; (use .*, )?detach the operands"
    )
    with pytest.raises(NotImplementedError, match=text):
        result.sum().backward()


@pytest.mark.gpu
def test_it_compiles_for_cuda():
    operands = tensor_arguments(PLAIN["paged_attention: plain"], "cuda")

    def step(operands):
        return torch.sin(xt.paged_attention(**operands)[0])

    actual = torch.compile(step, backend="inductor", fullgraph=True)(operands)
    torch.testing.assert_close(actual, step(operands), atol=1e-6, rtol=1e-6)
