"""The peers, each as a function that prepares a case and returns what is to be timed; None where it cannot run here.

A peer gets its data in the form it likes best (FlashInfer: K and V apart, its host plan made before the clock starts).
"""

import importlib.util

import torch


def available(name: str) -> bool:
    """The peer's package is installed."""
    return importlib.util.find_spec(name) is not None


def flashinfer(case, query, k_pages, v_pages):
    """FlashInfer's batch wrappers over paged K/V; the plan is not timed."""
    if not available("flashinfer"):
        return None
    import flashinfer

    used = [-(-n // case.page_size) for n in case.lens]
    pages = torch.cat([case.tables[i, :n] for i, n in enumerate(used)]).contiguous()
    indptr = torch.tensor([0, *used], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()
    last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.lens], dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    heads = (case.q_heads, case.kv_heads, case.head_dim, case.page_size)
    if all(n == 1 for n in case.q_lens):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, pages, last, *heads, q_data_type=query.dtype, kv_data_type=query.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        dtypes = {"q_data_type": query.dtype, "kv_data_type": query.dtype}
        wrapper.plan(case.query_start_loc, indptr, pages, last, *heads, causal=True, **dtypes)
    out = torch.empty_like(query)
    return lambda: wrapper.run(query, (k_pages, v_pages), out=out)


def fa3(case, query, k, v):
    """FlashAttention-3 on contiguous, equally long sequences (the wheel fa3_fwd has no paging)."""
    if not available("fa3_fwd_interface") or case.is_ragged():
        return None
    from fa3_fwd_interface import flash_attn_func

    q, k, v = (x.view(len(case.lens), -1, *x.shape[1:]) for x in (query, k, v))
    return lambda: flash_attn_func(q, k, v, causal=True)


def sdpa(backend):
    """torch's scaled_dot_product_attention with one backend, on contiguous, equally long prefills."""

    def prepare(case, query, k, v):
        if case.is_ragged() or case.q_lens != case.lens:
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.view(len(case.lens), -1, *x.shape[1:]).transpose(1, 2) for x in (query, k, v))

        def run():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    return prepare


def fa3_prefill(case, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """FlashAttention-3 on packed sequences; its call for equally long ones where they are."""
    if not available("fa3_fwd_interface"):
        return None
    from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

    options = {"causal": case.causal, "window_size": (case.window, -1 if case.window < 0 else 0)}
    if case.is_ragged():
        starts = (cu_seqlens_q, cu_seqlens_k, max(case.q_lens), max(case.lens))
        return lambda: flash_attn_varlen_func(q, k, v, *starts, **options)
    q, k, v = (x.view(len(case.lens), -1, *x.shape[1:]) for x in (q, k, v))
    return lambda: flash_attn_func(q, k, v, **options)


def cudnn_prefill(case, q, k, v, _cu_seqlens_q, _cu_seqlens_k):
    """cuDNN through torch, on equally long sequences without a window."""
    if case.is_ragged() or case.window >= 0:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.view(len(case.lens), -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
        return out.transpose(1, 2)

    return run


PAGED = {"flashinfer": flashinfer}
CONTIGUOUS = {"fa3": fa3, "fa2 (torch)": sdpa("FLASH_ATTENTION"), "cudnn (torch)": sdpa("CUDNN_ATTENTION")}
PREFILL = {"fa3": fa3_prefill, "cudnn": cudnn_prefill}
