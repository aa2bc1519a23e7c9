"""Options beside the same call without them on one GPU: `make bench ARGS="options.py word"`.

Bounds of keys per row (`k_start`, `k_end`), forward and gradients, over 4 sequences of 4096 tokens, in TFLOP/s that
count only what the masks leave; gradients count 2.5 times the operations of the forward call. Where another option says
the same mask, its speed follows. A bias of each pair's own, also in f32, one matrix per head and one matrix, over 4
sequences of 2048 and of 2047, both too, in microseconds.
The last line has all results as JSON.
"""

import functools
import itertools
import json
import time

import torch

import xla_attention.torch as xt
from harness import milliseconds, starts

HEADS = [(16, 16, 64), (16, 16, 128), (16, 4, 128), (16, 8, 256), (8, 4, 512)]
SEQUENCES, LENGTH = 4, 4096
# Of calls with a bias: rows that TMA loads, and rows of the bias that are copied or left to the portable kernels.
BIASED_LENGTHS = (2048, 2047)


def bounds_of_rows():
    """Per name the first key and the end of the keys of each row, and what else says the same, if anything does."""
    rows = torch.arange(LENGTH, dtype=torch.int32)
    document = rows // 512 * 512
    long_document = rows // 700 * 700
    none, causal_end = torch.zeros_like(rows), rows + 1
    distant = rows % 8 * 512
    return {
        "all keys by k_end": (none, torch.full_like(rows, LENGTH), {}),
        "causal by k_end": (none, causal_end, {"causal": True}),
        "a prefix of 1024": (none, causal_end.clamp(min=1024), None),
        "causal blocks of 512": (none, document + 512, None),
        "causal documents of 512": (document, causal_end, None),
        "documents of 700": (long_document, (long_document + 700).clamp(max=LENGTH), None),
        "rows in turns with 8 ranges of 64": (distant, distant + 64, None),
    }


def gradients_of(operands, cu, longest, causal=False, bias=None, **bounds):
    """The call of the gradients, with those of a bias if there is one."""
    q = operands[0]
    out, lse = xt.flash_attn_varlen(*operands, cu, causal=causal, return_lse=True, bias=bias, **bounds)
    scale = q.shape[-1] ** -0.5
    arguments = (torch.randn_like(out), *operands, out, lse, cu, cu, longest, longest, scale, causal, -1, -1, 0.0)
    if bias is None:
        return functools.partial(torch.ops.xla_gpu.flash_attn_varlen_bwd, *arguments, **bounds)
    biased = torch.ops.xla_gpu.flash_attn_varlen_bias_bwd
    return functools.partial(biased, *arguments, bias=bias, bias_gradient=True)


def calls_of(operands, cu, longest, variants):
    """The forward call and that of its gradients with the options of each variant, by kind and the variant's name."""
    calls = {}
    for name, options in variants.items():
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        calls[f"forward{name}"] = functools.partial(xt.flash_attn_varlen, *operands, cu, **lengths, **options)
        calls[f"gradients{name}"] = gradients_of(operands, cu, longest, **options)
    return calls


def packed(heads, length, dtype):
    """q, k, v and cu_seqlens of sequences of one length."""
    q_heads, kv_heads, head_dim = heads
    shapes = [(SEQUENCES * length, count, head_dim) for count in (q_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes], starts([length] * SEQUENCES)


def bounded(only, dtype, rows):
    """TFLOP/s of bounds of keys, forward and gradients, beside those of the same mask by another option."""
    for name, (first, end, same) in bounds_of_rows().items():
        for heads in HEADS:
            shape = f"{heads[0]}/{heads[1]} heads of {heads[2]}"
            if only not in f"{name}, {shape}":
                continue
            operands, cu = packed(heads, LENGTH, dtype)
            bounds = {"k_start": first.repeat(SEQUENCES).cuda(), "k_end": end.repeat(SEQUENCES).cuda()}
            variants = {"": bounds} if same is None else {"": bounds, " by another option": same}
            times = milliseconds(calls_of(operands, cu, LENGTH, variants))
            flops = 4 * (end - first).sum().item() * SEQUENCES * heads[0] * heads[2]
            rates = {kind: flops * (2.5 if "gradients" in kind else 1) / t / 1e9 for kind, t in times.items()}
            report(rows, f"{name}, {shape}", rates, "TFLOP/s")


def biased(only, dtype, rows):
    """Microseconds with a bias that nothing, the sequences, or they and the heads share, forward and gradients."""
    for heads, length in itertools.product(HEADS[:2] + HEADS[3:], BIASED_LENGTHS):
        name = f"bias, {length} tokens, {heads[0]}/{heads[1]} heads of {heads[2]}"
        if only not in name:
            continue
        operands, cu = packed(heads, length, dtype)
        own = (SEQUENCES, heads[0])
        forms = {
            "": (own, dtype),
            " in f32": (own, torch.float32),
            " per head": ((1, heads[0]), dtype),
            " one matrix": ((1, 1), dtype),
        }
        variants = {
            form: {"bias": torch.randn((*count, length, length), device="cuda", dtype=of_bias)}
            for form, (count, of_bias) in forms.items()
        }
        times = milliseconds(calls_of(operands, cu, length, {**variants, " without": {}}))
        report(rows, name, {kind: taken * 1e3 for kind, taken in times.items()}, "us")


def report(rows, name, values, unit):
    """Print a line of results and keep it."""
    print(f"{name:58}" + "".join(f" | {kind} {value:.0f}" for kind, value in values.items()) + f" {unit}", flush=True)
    rows.append({"case": name, unit: {kind: round(value, 1) for kind, value in values.items()}})
    torch.cuda.empty_cache()


def main(only="", dtype="bfloat16"):
    """Run the cases; prints a line per case, then JSON."""
    rows = []
    bounded(only, getattr(torch, dtype), rows)
    biased(only, getattr(torch, dtype), rows)
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "rows": rows}))
