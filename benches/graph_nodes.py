"""The kernels of a captured CUDA graph."""

import ctypes
import functools

KERNEL_NODE = 0  # of CUgraphNodeType


@functools.cache
def driver():
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def check(result, what):
    """Assert that a driver call succeeded."""
    assert result == 0, f"{what}: CUDA error {result}"


class NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid", "grid_y", "grid_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("extra", "kernel", "context")),
    ]


def kernel_nodes(graph):
    """Name and launch parameters of each kernel of a torch.cuda.CUDAGraph that was made with `keep_graph`."""
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    check(driver().cuGraphGetNodes(raw, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    check(driver().cuGraphGetNodes(raw, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    for node in map(ctypes.c_void_p, nodes):
        kind, params, name = ctypes.c_int(), NodeParams(), ctypes.c_char_p()
        check(driver().cuGraphNodeGetType(node, ctypes.byref(kind)), "cuGraphNodeGetType")
        if kind.value != KERNEL_NODE:
            continue
        check(driver().cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)), "cuGraphKernelNodeGetParams")
        if params.function:
            driver().cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.function))
        else:
            driver().cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kernel))
        yield (name.value or b"").decode(), params


def argument_bytes(params):
    """The size of a kernel's first argument."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    if params.function:
        get, function = driver().cuFuncGetParamInfo, params.function
    else:
        get, function = driver().cuKernelGetParamInfo, params.kernel
    check(
        get(ctypes.c_void_p(function), ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)),
        "cuFuncGetParamInfo",
    )
    return size.value
