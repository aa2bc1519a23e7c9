"""Libraries that the benchmarks compare with, each as a function that prepares a case and returns the call to time.

It returns None for a case or GPU that the peer does not support, or if its package is not installed. A peer gets its
data in its preferred form (FlashInfer: K and V in two caches, its host plan before the timing starts). `PREFILL` takes
packed keys with the starts of sequences, `PAGED` pages of K and of V.
"""

import functools
import importlib.metadata
import importlib.util
import pathlib

import torch


def available(name: str) -> bool:
    """Whether a package is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def report_failure(name, error):
    """Print why a peer did not run."""
    print(f"  {name} did not run: {type(error).__name__}: {str(error)[:160]}", flush=True)


def agreeing_calls(calls, run, relative_error, tolerance):
    """The calls that run and whose results agree with ours; AssertionError if some run and none agrees.

    Parameters
    ----------
    calls : dict
        Ours, named "ours", and the peers'.
    run
        Makes a call and returns its result.
    relative_error
        Of a result and ours.
    tolerance : float
        The largest error of results that agree.
    """
    expected = run(calls["ours"])
    agreeing, differing = {}, []
    for name, call in calls.items():
        try:
            error = relative_error(run(call), expected)
        except Exception as failure:
            report_failure(name, failure)
            continue
        if error < tolerance:
            agreeing[name] = call
        else:
            print(f"  {name} differs from ours by {error:.1e}", flush=True)
            differing.append(name)
    assert len(agreeing) > 1 or not differing, "ours differs from all"
    return agreeing


def versions(peer: str) -> dict[str, str]:
    """The versions of a peer's installed packages; empty for peers that are part of torch."""
    installed = {}
    for package in PACKAGES.get(peer, ()):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


@functools.cache
def fa3_operator():
    """FlashAttention-3's operator with pages and windows, from flash_attn_3 or xformers; None without either.

    Only its library is loaded, because xformers requires one version of torch.
    """
    for package, inside in (("flash_attn_3", "."), ("xformers", "flash_attn_3")):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for library in (pathlib.Path(folder) / inside).glob("_C*.so"):
                torch.ops.load_library(library)
                return torch.ops.flash_attn_3.fwd
    return None


def fa3(case, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """FlashAttention-3 on packed sequences, or on a batch where lengths are equal, which is faster.

    The wheel fa3_fwd is preferred; it has neither windows nor pages.
    """
    if not case.is_ragged():
        q, k, v = batched(case, q, k, v)
    if available("fa3_fwd_interface") and case.window < 0:
        from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

        if not case.is_ragged():
            return lambda: flash_attn_func(q, k, v, causal=case.causal, softcap=case.softcap)
        starts = (cu_seqlens_q, cu_seqlens_k, max(case.q_lens), max(case.lens))
        return lambda: flash_attn_varlen_func(q, k, v, *starts, causal=case.causal, softcap=case.softcap)
    if (operator := fa3_operator()) is None or case.softcap:
        return None
    options = {"is_causal": case.causal}
    if case.window >= 0:
        options |= {"window_size_left": case.window, "window_size_right": 0}
    if case.is_ragged():
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        options |= {"max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.lens)}
    return lambda: operator(q, k, v, num_splits=1, **options)


def fa3_paged(case, query, k_pages, v_pages):
    """FlashAttention-3 over pages, with its own choice of num_splits."""
    if (operator := fa3_operator()) is None:
        return None
    options = {"page_table": case.tables, "seqused_k": lengths(case), "max_seqlen_k": max(case.lens)}
    options |= {"cu_seqlens_q": case.query_start_loc, "max_seqlen_q": max(case.q_lens), "is_causal": True}
    if case.window >= 0:
        options |= {"window_size_left": case.window, "window_size_right": 0}
    return lambda: operator(query, k_pages, v_pages, **options)


def fa4(case, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """FlashAttention-4 (flash-attn-4) on packed sequences, or on a batch where lengths are equal."""
    if not available("flash_attn.cute"):
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"causal": case.causal, "window_size": (case.window, 0) if case.window >= 0 else (None, None)}
    if not case.is_ragged():
        q, k, v = batched(case, q, k, v)
        return lambda: flash_attn_func(q, k, v, **options)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.lens)}
    return lambda: flash_attn_varlen_func(q, k, v, **options)


def fa4_paged(case, query, k_pages, v_pages):
    """FlashAttention-4 over pages."""
    if not available("flash_attn.cute"):
        return None
    from flash_attn.cute import flash_attn_varlen_func

    options = {"page_table": case.tables, "seqused_k": lengths(case), "max_seqlen_k": max(case.lens)}
    options |= {"cu_seqlens_q": case.query_start_loc, "max_seqlen_q": max(case.q_lens), "causal": True}
    if case.window >= 0:
        options |= {"window_size": (case.window, 0)}
    return lambda: flash_attn_varlen_func(query, k_pages, v_pages, **options)


def fa2(case, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """FlashAttention-2 of torch, by the operator below scaled_dot_product_attention, which takes packed keys."""
    starts = (cu_seqlens_q, cu_seqlens_k)
    if not case.is_ragged():
        q, k, v = batched(case, q, k, v)
        starts = (None, None)
    # Dropout, causal, the debug mask.
    flags = (max(case.q_lens), max(case.lens), 0.0, case.causal, False)
    window = {"window_size_left": case.window, "window_size_right": 0} if case.window >= 0 else {}
    return lambda: torch.ops.aten._flash_attention_forward(q, k, v, *starts, *flags, **window)


def cudnn(case, q, k, v, _cu_seqlens_q, _cu_seqlens_k):
    """cuDNN through torch, on sequences of one length without a window."""
    if case.is_ragged() or case.window >= 0:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in batched(case, q, k, v))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def flashinfer(case, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """FlashInfer's wrapper over packed keys; the plan is not timed."""
    if not available("flashinfer"):
        return None
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(flashinfer_workspace(), "NHD")
    options = {"causal": case.causal, "window_left": case.window, "q_data_type": q.dtype, "kv_data_type": q.dtype}
    wrapper.plan(cu_seqlens_q, cu_seqlens_k, case.q_heads, case.kv_heads, case.head_dim, **options)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, k, v, out=out)


def flashinfer_paged(case, query, k_pages, v_pages, backend="auto", use_tensor_cores=True):
    """FlashInfer's batch wrappers over paged K/V; the plan is not timed. `use_tensor_cores` is for decode."""
    if not available("flashinfer"):
        return None
    import flashinfer

    used = [-(-n // case.page_size) for n in case.lens]
    pages = torch.cat([case.tables[i, :n] for i, n in enumerate(used)]).contiguous()
    indptr = torch.tensor([0, *used], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()
    last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.lens], dtype=torch.int32, device="cuda")
    heads = (case.q_heads, case.kv_heads, case.head_dim, case.page_size)
    options = {"q_data_type": query.dtype, "kv_data_type": k_pages.dtype, "window_left": case.window}
    if all(n == 1 for n in case.q_lens):
        if backend != "auto":
            return None
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            flashinfer_workspace(), "NHD", use_tensor_cores=use_tensor_cores
        )
        wrapper.plan(indptr, pages, last, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(flashinfer_workspace(), "NHD", backend=backend)
        wrapper.plan(case.query_start_loc, indptr, pages, last, *heads, causal=True, **options)
    out = torch.empty_like(query)
    return lambda: wrapper.run(query, (k_pages, v_pages), out=out)


def flashinfer_fa2_paged(case, query, k_pages, v_pages):
    """FlashInfer over pages with its kernels for older GPUs, which are faster for few queries."""
    return flashinfer_paged(case, query, k_pages, v_pages, backend="fa2")


def flashinfer_cuda_cores_paged(case, query, k_pages, v_pages):
    """FlashInfer's decode without tensor cores, which is faster for short contexts of few heads per KV head."""
    if any(n > 1 for n in case.q_lens):
        return None
    return flashinfer_paged(case, query, k_pages, v_pages, use_tensor_cores=False)


def flashinfer_workspace():
    """The workspace of FlashInfer's wrappers."""
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def batched(case, *tensors):
    """Packed sequences of one length as [sequences, tokens, heads, D]."""
    return [x.view(len(case.lens), -1, *x.shape[1:]) for x in tensors]


def lengths(case):
    """Keys of each sequence."""
    return torch.tensor(case.lens, dtype=torch.int32, device="cuda")


PACKAGES = {
    "fa3": ("fa3_fwd", "flash_attn_3", "xformers"),
    "fa4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
}
PREFILL = {"fa2": fa2, "fa3": fa3, "fa4": fa4, "cudnn": cudnn, "flashinfer": flashinfer}
PAGED = {
    "fa3": fa3_paged,
    "fa4": fa4_paged,
    "flashinfer": flashinfer_paged,
    "flashinfer fa2": flashinfer_fa2_paged,
    "flashinfer cuda cores": flashinfer_cuda_cores_paged,
}
