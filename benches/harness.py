"""Timing with CUDA graphs, and our operators on torch's tensors without a framework in between."""

import ctypes
import statistics
from collections.abc import Callable

import torch

from xla_attention import _library

TORCH_DTYPES = {torch.float16: 10, torch.bfloat16: 16, torch.float32: 11, torch.int32: 4}


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


class PagedAttention:
    """`xla_gpu_paged_attention` on torch's current stream, through the library's C interface."""

    def __init__(self, query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, *, scale):
        self.out = torch.empty_like(query)
        operands = [query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs]
        self.lib = _library.library()
        values = [
            _library._Attribute(0, 0.0, 0),
            _library._Attribute(2, scale, 0),
            _library._Attribute(1, 0.0, -1),
            _library._Attribute(2, 0.0, 0),
        ]
        self.keep = [query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, values]
        self.request = _library._Call(
            struct_size=ctypes.sizeof(_library._Call),
            op=self.lib.xa_op(b"xla_gpu_paged_attention"),
            operands=tensors(operands),
            num_operands=len(operands),
            results=tensors([self.out]),
            num_results=1,
            attributes=(_library._Attribute * 4)(*values),
            num_attributes=4,
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


def tensors(values):
    """torch tensors as the C interface's structs."""

    def one(tensor):
        dims = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        return _library._Tensor(tensor.data_ptr(), dims, None, tensor.dim(), TORCH_DTYPES[tensor.dtype])

    return (_library._Tensor * len(values))(*map(one, values))
