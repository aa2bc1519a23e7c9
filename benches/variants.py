"""Variants of our Hopper prefill kernel against the library's kernel and FA3, in interleaved rounds of one process.

`make bench ARGS="variants.py FOLDER word"` times, in the cases of prefill.py over packed keys whose name contains the
word, every `<tag>__<kernel>.cubin` of the folder, with <kernel> as in kernels/variants.toml:

    nvcc -std=c++17 -O3 -cubin -arch=sm_90a -DXA_ENTRY=xa_<kernel> -DXA_DTYPE=.. -DXA_HEAD_DIM=.. \
      -DXA_STORAGE=contiguous -DXA_LOGITS=.. -Ikernels/include -Itarget/include kernels/hopper_prefill.cu \
      -o FOLDER/<tag>__<kernel>.cubin

The arguments are those of the library's launch, read from a captured graph. `<tag>.json` beside a cubin overrides
`threads`, `shared_bytes`, `rows` of a tile, `keys` of a block, `counter`. Without a build of the library, a variant can
be measured within seconds.
"""

import ctypes
import functools
import json
import pathlib
import struct

import torch

import harness
import peers
import prefill
from graph_nodes import argument_bytes, check, driver, kernel_nodes
from prefill_cases import CASES

# Fields of HopperPrefillParams (src/cuda/params/hopper_prefill.rs) that a variant changes, as offsets from its end.
OFFSETS = {"q": -640, "k": -512, "v": -384, "next_tile": -128}
ALIGNMENT = 64
# Enumerators of cuda.h.
MAX_DYNAMIC_SHARED_BYTES, BF16, SWIZZLE_128B, PROMOTE_256B, CLUSTER_DIMENSION = 8, 9, 3, 3, 4
# The largest relative error of a variant: another block size rounds differently.
TOLERANCE = 3e-3


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the dimensions of a cluster; the value has 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def launch_of(call):
    """The prefill launch of a call: kernel, parameters, (grid x and y, threads, shared bytes), result, the graph."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = call()
    for name, params in kernel_nodes(graph):
        if "hopper_prefill" in name:
            argument = ctypes.string_at(params.arguments[0], argument_bytes(params))
            shape = (params.grid, params.grid_y, params.threads, params.shared_bytes)
            return name.removeprefix("xa_"), argument, shape, result, graph
    return None


def tensor_map(tensor, axes):
    """The 128 bytes of a CUtensorMap for axes of (size, stride in elements, box size), innermost first."""
    lens, strides, boxes = zip(*axes, strict=True)
    count, memory = len(axes), (ctypes.c_char * (128 + ALIGNMENT))()
    address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    result = driver().cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(address), BF16, count, ctypes.c_void_p(tensor.data_ptr())),
        *((ctypes.c_uint64 * count)(*lens), (ctypes.c_uint64 * count)(*(2 * s for s in strides[1:]))),
        *((ctypes.c_uint32 * count)(*boxes), (ctypes.c_uint32 * count)(*[1] * count)),
        *(0, SWIZZLE_128B, PROMOTE_256B, 0),
    )
    check(result, "cuTensorMapEncodeTiled")
    return ctypes.string_at(address, 128)


@functools.cache
def function(path, kernel, shared_bytes):
    """The kernel of a cubin."""
    module, kernel_function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoad(ctypes.byref(module), str(path).encode()), path)
    check(driver().cuModuleGetFunction(ctypes.byref(kernel_function), module, f"xa_{kernel}".encode()), kernel)
    check(driver().cuFuncSetAttribute(kernel_function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes), "cuFuncSetAttribute")
    return kernel_function


def replace(params, field, value):
    """Replace the bytes of a field of a HopperPrefillParams."""
    begin = len(params) + OFFSETS[field]
    params[begin : begin + len(value)] = value


def variant(path, overrides, launch, q, k, v):
    """A call of a cubin with the arguments of the library's launch, except those in `overrides`."""
    kernel, argument, (grid, cluster, threads, shared_bytes), result, _ = launch
    shared_bytes = overrides.get("shared_bytes", shared_bytes)
    buffer = (ctypes.c_char * (len(argument) + ALIGNMENT))()
    address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    params = bytearray(argument)
    if "rows" in overrides:
        tokens, heads, dim = q.shape
        rows = (tokens, heads * dim, overrides["rows"])
        axes = [(64, 1, 64), (1, dim, 1), (heads, dim, 1), rows, (dim // 64, 64, dim // 64)]
        replace(params, "q", tensor_map(q, axes))
    for name, keys in (("k", k), ("v", v)) if "keys" in overrides else ():
        tokens, heads, dim = keys.shape
        block = (tokens, heads * dim, overrides["keys"])
        axes = [(64, 1, 64), block, (dim // 64, 64, dim // 64), (heads, dim, 1), (1, 64, 1)]
        replace(params, name, tensor_map(keys, axes))
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    has_counter = struct.unpack_from("<Q", params, len(params) + OFFSETS["next_tile"])[0] != 0
    counts = overrides.get("counter", True) and has_counter
    replace(params, "next_tile", struct.pack("<Q", counter.data_ptr() if counts else 0))
    ctypes.memmove(address, bytes(params), len(params))
    arguments = (ctypes.c_void_p * 1)(address)
    code = function(path, kernel, shared_bytes)

    def run(keep=(buffer, counter)):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if counts:
            counter.zero_()
        shape = (grid, cluster, 1, overrides.get("threads", threads), 1, 1, shared_bytes)
        attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (1, cluster, 1))
        config = LaunchConfig(*shape, stream, ctypes.pointer(attribute), 1)
        check(driver().cuLaunchKernelEx(ctypes.byref(config), code, arguments, None), path)
        return result

    return run


def main(folder, only=""):
    """Run the cases; prints a line per case."""
    for case in CASES:
        if only not in case.name or case.page_size:
            continue
        torch.manual_seed(len(case.name))
        operands = prefill.packed_operands(case)
        q, k, v = operands[:3]
        ours = prefill.ours_packed(case, *operands)
        launch = launch_of(ours)
        if launch is None:
            continue
        calls = {"ours": ours} | harness.prepare_peers({"fa3": peers.fa3}, case, *operands)
        for path in sorted(pathlib.Path(folder).glob(f"*__{launch[0]}.cubin")):
            tag = path.name.split("__")[0]
            file = path.with_name(f"{tag}.json")
            calls[tag] = variant(path, json.loads(file.read_text()) if file.exists() else {}, launch, q, k, v)
        shape = (*q.shape[:2], case.value_dim)
        expected = harness.rows_of(ours(), shape)
        written = launch[3] if torch.is_tensor(launch[3]) else launch[3][0]
        for tag, call in calls.items():
            written.zero_()
            error = ((harness.rows_of(call(), shape) - expected).norm() / expected.norm()).item()
            assert error < TOLERANCE, f"{case.name}: {tag} differs by {error:.1e}"
        times = harness.milliseconds(calls)
        rates = {tag: case.flops() / taken / 1e9 for tag, taken in times.items()}
        print(f"{case.name:20}" + "".join(f" | {tag} {rate:.0f}" for tag, rate in rates.items()), flush=True)
