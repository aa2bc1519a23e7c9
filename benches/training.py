"""Gradients of attention against other libraries on one GPU: `make bench ARGS="training.py word"`, as prefill.py.

The forward call is not timed. TFLOP/s counts 2.5 times the operations of the forward call, whatever a library
recomputes. The last line has all results as JSON.
"""

import json
import time

import torch

import peers
import xla_attention.torch as xt
from harness import agreeing, milliseconds, prepare_peers
from prefill import packed_operands
from prefill_cases import CASES


def ours(case, dout, q, k, v, cu_q, cu_k, deterministic=False):
    """The call of our gradients."""
    out, lse = xt.flash_attn_varlen(q, k, v, cu_q, cu_k, causal=case.causal, return_lse=True)
    options = (max(case.q_lens), max(case.lens), case.head_dim**-0.5, case.causal, -1, -1, 0.0)
    operands = (dout, q, k, v, out, lse, cu_q, cu_k, *options)
    return lambda: concatenated(torch.ops.xla_gpu.flash_attn_varlen_bwd(*operands, deterministic=deterministic)[:3])


def concatenated(gradients):
    """dq, dk and dv as one tensor, to be compared; not while a graph to be timed is captured."""
    return gradients if torch.cuda.is_current_stream_capturing() else torch.cat([x.reshape(-1) for x in gradients])


def fa2(case, dout, q, k, v, cu_q, cu_k):
    """FlashAttention-2 of torch."""
    starts = (cu_q, cu_k)
    if not case.is_ragged():
        dout, q, k, v = peers.batched(case, dout, q, k, v)
        starts = (None, None)
    longest = (max(case.q_lens), max(case.lens))
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, *longest, 0.0, case.causal, False
    )
    operands = (dout, q, k, v, out, lse, *starts, *longest, 0.0, case.causal, seed, unused)
    return lambda: concatenated(torch.ops.aten._flash_attention_backward(*operands))


def cudnn(case, dout, q, k, v, _cu_q, _cu_k):
    """cuDNN through torch, on sequences of one length with as many KV heads as query heads."""
    if case.is_ragged() or case.q_heads != case.kv_heads:
        return None
    dout, q, k, v = (x.transpose(1, 2) for x in peers.batched(case, dout, q, k, v))
    forward, backward = (getattr(torch.ops.aten, f"_scaled_dot_product_cudnn_attention{x}") for x in ("", "_backward"))
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, None, True, 0.0, case.causal)
    rest = (seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, case.causal)
    operands = (dout, q, k, v, out, lse, *rest)
    return lambda: concatenated([x.transpose(1, 2) for x in backward(*operands)])


def fa3(case, dout, q, k, v, cu_q, cu_k):
    """FlashAttention-3 of xformers."""
    if peers.fa3_operator() is None:
        return None
    options = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
    if case.is_ragged():
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        options |= {"max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.lens)}
    else:
        dout, q, k, v = peers.batched(case, dout, q, k, v)
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options)
    gradients = [torch.empty_like(x) for x in (q, k, v)]

    def run():
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *gradients, **options)
        return concatenated(gradients)

    return run


PEERS = {"fa2": fa2, "fa3": fa3, "cudnn": cudnn}


def operands(case):
    """dout and the packed operands of a case."""
    q, k, v, cu_q, cu_k = packed_operands(case)
    return torch.randn_like(q[..., :1].expand(*q.shape[:2], case.value_dim)), q, k, v, cu_q, cu_k


def main(only=""):
    """Run the cases; prints a line per case, then JSON."""
    rows = []
    for case in CASES:
        if only not in case.name or case.page_size or case.window >= 0 or case.fp8 or case.softcap:
            continue
        torch.manual_seed(len(case.name))
        given = operands(case)
        times = milliseconds(agreeing({"ours": ours(case, *given)} | prepare_peers(PEERS, case, *given), 2e-2))
        torch.cuda.empty_cache()
        rates = {name: 2.5 * case.flops() / taken / 1e9 for name, taken in times.items()}
        ratios = "".join(f", {rates['ours'] / rate:.2f}x {name}" for name, rate in rates.items() if name != "ours")
        print(f"{case.name:32}" + "".join(f" | {name} {rate:.0f}" for name, rate in rates.items()) + ratios, flush=True)
        rows.append({"case": case.name, "tflops": {name: round(rate, 1) for name, rate in rates.items()}})
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "rows": rows}))
