"""Ring attention in torch: sequences that are spread over processes, forward and backward.

    python examples/torch_ring_attention.py [--processes 2] [--layout contiguous | zigzag] [--dtype float32 | bfloat16]
    torchrun --nproc-per-node 4 examples/torch_ring_attention.py --device cuda

Every process has some rows of q, k and v. The keys and values travel around the ring of processes, and each process
attends to those that it has with flash_attn_varlen. merge_attention_states merges the results by their log-sum-exps. In
the backward pass the keys and values travel once more, and their gradients travel with them; with the final output and
log-sum-exps, each call of the backward operator gives exactly the share of its keys. All parts of a sum are f32.

The transfers of a step run beside its attention. With `contiguous`, process r has the rows from ``r * T / n`` on of all
sequences packed, so that causal attention keeps the last process busy longest. `zigzag` cuts every sequence into 2 n
chunks, and process r has the chunks r and 2 n - 1 - r of each: the same work for every process. The program compares
the results with attention in one process.
"""

import argparse
import dataclasses
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xla_attention.torch import flash_attn_varlen, merge_attention_states

CU_SEQLENS = [0, 16, 16, 144, 240]  # lengths that 2 n divides, for up to 8 processes
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


@dataclasses.dataclass(frozen=True)
class Ring:
    """The processes that the sequences are spread over, and the order of their rows."""

    layout: str = "contiguous"  # or "zigzag"
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("contiguous", "zigzag"):
            raise ValueError(f"layout is {self.layout!r}, expected 'contiguous' or 'zigzag'")

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return dist.get_rank(self.group)

    def send(self, array: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Send to the next process; the array from the one before is there when the work is done."""
        received = torch.empty_like(array)
        after, before = ((self.rank + i) % self.size for i in (1, -1))
        if self.group is not None:
            after, before = (dist.get_global_rank(self.group, i) for i in (after, before))
        transfers = [
            dist.P2POp(dist.isend, array, after, self.group),
            dist.P2POp(dist.irecv, received, before, self.group),
        ]
        return received, dist.batch_isend_irecv(transfers)


def rows_of_process(cu_seqlens: torch.Tensor, ring: Ring, rank: int) -> torch.Tensor:
    """Which rows of the packed sequences a process has, in its order."""
    total = int(cu_seqlens[-1])
    if ring.layout == "contiguous":
        if total % ring.size:
            raise ValueError(f"there are {total} rows, expected a multiple of the {ring.size} processes")
        return torch.arange(total).chunk(ring.size)[rank]
    rows = []
    for start, length in zip(cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist(), strict=True):
        if length % (2 * ring.size):
            raise ValueError(f"zigzag: a sequence has {length} rows, expected a multiple of {2 * ring.size}")
        chunk = length // (2 * ring.size)
        rows += [start + i * chunk + torch.arange(chunk) for i in (rank, 2 * ring.size - 1 - rank)]
    return torch.cat(rows)


def local_starts(cu_seqlens: torch.Tensor, ring: Ring, rank: int, rows: int) -> torch.Tensor:
    """The `cu_seqlens` of the rows of a process."""
    if ring.layout == "zigzag":
        return cu_seqlens // ring.size
    return (cu_seqlens - rank * rows).clamp(0, rows)


def step_starts(
    cu_seqlens: torch.Tensor, ring: Ring, causal: bool, source: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cu_seqlens_q` and `cu_seqlens_k` for the keys of another process, of which a row attends to all or to none.

    A row attends to none if its sequence has none here: sequences without keys cost nothing but zeros. In zigzag, each
    sequence is two. All rows attend to the first chunk of an earlier process; the second chunk alone attends to both
    chunks of a later one.
    """
    starts_q, starts_k = (local_starts(cu_seqlens, ring, rank, rows) for rank in (ring.rank, source))
    if not causal:
        return starts_q, starts_k
    is_earlier = source < ring.rank
    if ring.layout == "contiguous":
        return starts_q, starts_k if is_earlier else torch.zeros_like(starts_k)
    first, last = starts_q[:-1], starts_q[1:]
    middle = (first + last) // 2
    between_q, between_k = (last, middle) if is_earlier else (middle, first)
    return tuple(
        torch.cat([torch.stack([first, between], 1).reshape(-1), starts_q[-1:]]) for between in (between_q, between_k)
    )


class RingAttention(torch.autograd.Function):
    """Attention of packed sequences whose rows are spread over the processes of a ring; see `ring_attention`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        ring: Ring,
        causal: bool,
        softmax_scale: float,
    ) -> torch.Tensor:
        """The output of this process' rows."""
        rows = len(q)
        kv = torch.stack([k, v])  # one transfer for both
        out = lse = None
        for step in range(ring.size):
            following, works = ring.send(kv) if step + 1 < ring.size else (None, [])
            starts = starts_of_step(cu_seqlens, ring, causal, step, rows)
            options = {"causal": causal and step == 0, "softmax_scale": softmax_scale, "max_seqlen_q": rows}
            options |= {"max_seqlen_k": rows, "return_lse": True, "out_dtype": torch.float32}
            part, part_lse = flash_attn_varlen(q, *kv, *starts, **options)
            out, lse = (part, part_lse) if step == 0 else merge_attention_states(out, lse, part, part_lse)
            for work in works:
                work.wait()
            kv = following
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
        ctx.ring, ctx.causal, ctx.softmax_scale = ring, causal, softmax_scale
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of this process' rows."""
        q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
        ring, rows = ctx.ring, len(q)
        dout, kv = dout.contiguous(), torch.stack([k, v])
        dq, dkv, dkv_works = torch.zeros_like(q, dtype=torch.float32), None, []
        for step in range(ring.size):
            following, works = ring.send(kv) if step + 1 < ring.size else (None, [])
            starts = starts_of_step(cu_seqlens, ring, ctx.causal, step, rows)
            causal = ctx.causal and step == 0
            # max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap
            options = rows, rows, ctx.softmax_scale, causal, -1, -1, 0.0
            grads = torch.ops.xla_gpu.flash_attn_varlen_bwd(
                dout, q, *kv, out, lse, *starts, *options, grad_dtype=torch.float32
            )
            dq += grads[0]
            share = torch.stack(grads[1:3])
            for work in dkv_works:
                work.wait()
            # The gradients of these keys arrive one step after the keys.
            dkv = share if step == 0 else dkv + share
            dkv, dkv_works = ring.send(dkv)
            for work in works:
                work.wait()
            kv = following
        for work in dkv_works:  # the gradients are back where their keys are
            work.wait()
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def starts_of_step(
    cu_seqlens: torch.Tensor, ring: Ring, causal: bool, step: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The starts of a step, in which this process has the keys of the process that is `step` before it."""
    if step == 0:
        return (local_starts(cu_seqlens, ring, ring.rank, rows),) * 2
    return step_starts(cu_seqlens, ring, causal, (ring.rank - step) % ring.size, rows)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ring: Ring,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention of this process' rows to the keys of all processes; differentiable in q, k and v.

    Parameters
    ----------
    q, k, v
        ``[T / n, Hq, D]`` and ``[T / n, Hkv, D]``: the rows that `rows_of_process` names. K and V have one shape.
    cu_seqlens
        ``i32[B + 1]`` of all T rows, the same in every process.
    ring
        The processes, and the layout of the rows.
    causal
        Whether a row attends to no later row of its sequence.
    softmax_scale
        ``D ** -0.5`` by default.
    """
    if k.shape != v.shape:
        raise ValueError(f"v has shape {list(v.shape)}, expected that of k, {list(k.shape)}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return RingAttention.apply(q, k, v, cu_seqlens, ring, causal, scale)


def compare(ring: Ring, device: torch.device, dtype: torch.dtype, causal: bool) -> float:
    """The largest difference between the ring and one process, of the output and the gradients.

    Each is divided by the largest number of its array.
    """
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    heads = Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS
    whole = [torch.randn(CU_SEQLENS[-1], h, HEAD_DIM, generator=generator).to(device, dtype) for h in heads]
    mine = rows_of_process(cu_seqlens, ring, ring.rank).to(device)
    cu_seqlens = cu_seqlens.to(device)

    def with_gradients(arrays: list[torch.Tensor], attend: object) -> list[torch.Tensor]:
        *qkv, dout = arrays
        qkv = [x.detach().requires_grad_() for x in qkv]
        out = attend(*qkv)
        return [out, *torch.autograd.grad(out, qkv, dout)]

    found = with_gradients([x[mine] for x in whole], lambda *x: ring_attention(*x, cu_seqlens, ring, causal=causal))
    expected = with_gradients(whole, lambda *x: flash_attn_varlen(*x, cu_seqlens, causal=causal))
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True)]
    return max(((x - y[mine]).abs().max() / y.abs().max()).item() for x, y in pairs)


def run(rank: int, size: int, options: argparse.Namespace, init_method: str) -> None:
    """One process of the ring."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ring, dtype = Ring(options.layout), getattr(torch, options.dtype)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for causal in (True, False):
        difference = torch.tensor(compare(ring, device, dtype, causal), device=device)
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if rank == 0:
            agree = difference.item() < bound
            print(
                f"{size} processes, {ring.layout}, causal={causal}: largest difference {difference.item():.1e},", end=""
            )
            print(f" the ring and one process agree: {agree}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or be one that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="zigzag")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.processes, options, f"file://{folder}/store"
        method = "fork" if options.device == "cpu" else "spawn"
        mp.start_processes(run, arguments, nprocs=options.processes, start_method=method)


if __name__ == "__main__":
    main()
