"""A page allocator and a serving loop with the arguments of a vLLM attention backend.

    python examples/torch_vllm_style.py [cpu | cuda | xla]

Sequences start, grow by one token per step, and end; each step is one call for all of them. The result of every token
is compared with dense attention over its sequence.
"""

import sys

import torch

from xla_attention.torch import vllm_style

PAGE_SIZE, KV_HEADS, Q_HEADS, HEAD_DIM = 16, 2, 8, 64


class Pages:
    """Allocates the pages of a cache."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.allocated: dict[str, list[int]] = {}

    def slots(self, name: str, first: int, count: int) -> list[int]:
        """The slots of tokens `first` to `first + count` of a sequence; allocates missing pages."""
        pages = self.allocated.setdefault(name, [])
        while len(pages) * PAGE_SIZE < first + count:
            pages.append(self.free.pop())
        return [pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(first, first + count)]

    def release(self, name: str) -> None:
        """Free the pages of a sequence."""
        self.free += self.allocated.pop(name)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows of one sequence, `[rows, heads, D]`."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1)


def main(device: str = "cpu") -> None:
    """Serve three sequences that start at different steps."""
    if device == "xla":
        import torch_xla  # noqa: F401  defines the device

    torch.manual_seed(0)
    pages = Pages(24)
    kv_cache = torch.zeros(2, 24, PAGE_SIZE, KV_HEADS, HEAD_DIM).to(device)
    prompts = {"a": 40, "b": 7, "c": 90}
    history: dict[str, list[torch.Tensor]] = {}  # all keys and values, for the comparison
    largest = 0.0
    for step in range(12):
        if step in (0, 2, 5):
            history[list(prompts)[len(history)]] = []
        running = [name for name in history if not (name == "b" and step > 8)]
        if step == 9:
            pages.release("b")
        lens = {name: prompts[name] + sum(len(k) for k, _ in history[name][1:]) for name in running if history[name]}
        new = {name: 1 if history[name] else prompts[name] for name in running}
        rows = sum(new.values())
        q = torch.randn(rows, Q_HEADS, HEAD_DIM)
        k, v = torch.randn(rows, KV_HEADS, HEAD_DIM), torch.randn(rows, KV_HEADS, HEAD_DIM)
        starts, slots = [0], []
        for name, count in new.items():
            slots += pages.slots(name, lens.get(name, 0), count)
            history[name].append((k[starts[-1] : starts[-1] + count], v[starts[-1] : starts[-1] + count]))
            starts.append(starts[-1] + count)
        seq_lens = [lens.get(name, 0) + count for name, count in new.items()]
        longest = max(len(pages.allocated[name]) for name in new)
        table = [pages.allocated[name] + [0] * (longest - len(pages.allocated[name])) for name in new]
        metadata = [torch.tensor(x, dtype=torch.int32).to(device) for x in (slots, table, seq_lens, starts)]
        out = vllm_style.attention(
            *(x.to(device) for x in (q, k, v)), kv_cache, *metadata, scale=HEAD_DIM**-0.5, max_seq_len=max(seq_lens)
        ).cpu()
        for i, name in enumerate(new):
            rows_of = slice(starts[i], starts[i + 1])
            keys, values = (torch.cat([part[side] for part in history[name]]) for side in (0, 1))
            largest = max(largest, (out[rows_of] - dense(q[rows_of], keys, values)).abs().max().item())
        print(f"step {step}: {dict(zip(new, seq_lens, strict=True))} keys, {len(pages.free)} pages free")
    print(f"largest difference from a dense computation: {largest:.1e}")
    assert largest < 1e-5


if __name__ == "__main__":
    main(*sys.argv[1:])
