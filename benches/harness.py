"""Timing with CUDA graphs, and our operators on torch's tensors without a framework in between."""

import ctypes
import statistics
from collections.abc import Callable

import torch

from xla_attention import _library

TORCH_DTYPES = {
    torch.float16: 10,
    torch.bfloat16: 16,
    torch.float32: 11,
    torch.int32: 4,
    torch.uint8: 6,
    torch.float8_e5m2: 19,
    torch.float8_e4m3fn: 20,
}


def graph_time_us(function: Callable[[], object], calls: int = 5, replays: int = 7) -> float:
    """Median microseconds of one call, over replays of a CUDA graph that holds `calls` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


class LibraryCall:
    """An operator on torch's current stream, through the library's C interface. Calling it gives its first result.

    Operands and results are torch tensors in the order of the target's signature, None for one that is left out;
    attributes are Python values by name, in any order.
    """

    def __init__(self, target, operands, results, attributes):
        self.lib = _library.library()
        self.out = results[0]
        values = [attribute(attributes[name]) for name in sorted(attributes)]
        self.keep = [*operands, *results]
        self.request = _library._Call(
            struct_size=ctypes.sizeof(_library._Call),
            op=self.lib.xa_op(target.encode()),
            operands=tensors(operands),
            num_operands=len(operands),
            results=tensors(results),
            num_results=len(results),
            attributes=(_library._Attribute * len(values))(*values),
            num_attributes=len(values),
        )
        self.message = ctypes.create_string_buffer(1024)
        self._run(2)  # loads the module, as XLA's initialize stage does

    def _run(self, action):
        self.request.action = action
        self.request.stream = torch.cuda.current_stream().cuda_stream
        if self.lib.xa_call(ctypes.byref(self.request), self.message, len(self.message)):
            raise RuntimeError(self.message.value.decode())

    def __call__(self):
        self._run(3)
        return self.out


def paged_attention(query, kv_cache, *metadata, scale, batch_invariant=False):
    """`xla_gpu_paged_attention` with the workspace it wants; `metadata` are its four index operands."""
    out = torch.empty_like(query)
    attributes = {"batch_invariant": batch_invariant, "scale": scale, "sliding_window": -1, "soft_cap": 0.0}
    results = [out, None, workspace(query, out, kv_cache.shape[2] // 2, len(metadata[0]), batch_invariant)]
    return LibraryCall("xla_gpu_paged_attention", [query, kv_cache, *metadata], results, attributes)


def flash_attn_varlen(q, k, v, cu_seqlens, *, causal):
    """`xla_gpu_flash_attn_varlen` over packed keys, as many as queries."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], device=q.device)
    attributes = {
        "batch_invariant": False,
        "causal": causal,
        "kv_layout": 0,
        "max_seqlen_k": 0,
        "max_seqlen_q": 0,
        "softcap": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "top_left": False,
        "window_left": -1,
        "window_right": -1,
    }
    results = [out, lse, workspace(q, out, k.shape[1], len(cu_seqlens) - 1, False)]
    return LibraryCall("xla_gpu_flash_attn_varlen", [q, k, v, cu_seqlens, cu_seqlens], results, attributes)


def workspace(query, out, kv_heads, seqs, batch_invariant):
    """Device memory of the wanted size."""
    sizes = (query.shape[1], kv_heads, query.shape[2], out.shape[-1])
    coefficients = (ctypes.c_int64 * 3)()
    _library.library().xa_attention_workspace(
        *sizes, TORCH_DTYPES[query.dtype], batch_invariant, ctypes.byref(coefficients)
    )
    constant, per_row, per_sequence = coefficients
    size = constant + per_row * len(query) + per_sequence * seqs
    return torch.empty(size, dtype=torch.uint8, device=query.device) if size else None


def attribute(value):
    """A Python value as the C interface's struct."""
    kind = {bool: 0, int: 1, float: 2}[type(value)]
    return _library._Attribute(kind, value if kind == 2 else 0.0, 0 if kind == 2 else value)


def tensors(values):
    """torch tensors as the C interface's structs."""

    def one(tensor):
        if tensor is None:
            return _library._Tensor()
        dims = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        return _library._Tensor(tensor.data_ptr(), dims, None, tensor.dim(), TORCH_DTYPES[tensor.dtype])

    return (_library._Tensor * len(values))(*map(one, values))
