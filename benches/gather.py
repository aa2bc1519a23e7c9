"""gather_kv_cache against a copy on one GPU.

`make bench ARGS="gather.py word"` runs the cases whose name contains the word. Bytes are those that have to be
read and written once. The copy is torch's between two device buffers, of as many bytes, in the same interleaved rounds.
The last line has all results as JSON.
"""

import functools
import json
import math
from dataclasses import dataclass

import torch

import xla_attention.torch as xt
from harness import milliseconds

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KV_HEADS = 8


@dataclass
class Case:
    """`tokens` tokens of `sequences` sequences of about equal length, in random pages of a cache of twice the size."""

    tokens: int = 65536
    sequences: int = 32
    page_size: int = 16
    head_dim: int = 128
    cache: str = "bf16"
    out: str = ""
    layout: str = "interleaved"
    scale: float | None = None

    @property
    def name(self):
        """All parameters."""
        out = f" to {self.out}" if self.out else ""
        sizes = f"{self.tokens} tokens of {self.sequences}, pages of {self.page_size}, D {self.head_dim}"
        return f"{sizes}, {self.cache}{out}, {self.layout}" + ("" if self.scale is None else f", scale {self.scale}")

    def bytes(self):
        """Bytes read and written, each once."""
        elements = 2 * self.tokens * KV_HEADS * self.head_dim
        return elements * (DTYPES[self.cache].itemsize + DTYPES[self.out or self.cache].itemsize)


CASES = [
    *(Case(page_size=p, head_dim=d) for p in (1, 16, 64, 256) for d in (64, 128, 256)),
    *(Case(layout=layout, page_size=p) for layout in ("split", "stacked", "per_page") for p in (1, 16, 256)),
    *(Case(cache=c, out=o, head_dim=d) for c, o in (("f32", ""), ("e4m3fn", "e4m3fn")) for d in (64, 128, 256)),
    *(Case(cache=c, out=o) for c in ("e4m3fn", "e5m2") for o in ("bf16", "f32")),
    *(Case(cache="e4m3fn", out="bf16", scale=0.37, page_size=p) for p in (1, 16, 256)),
    Case(scale=0.37),
    *(Case(sequences=s) for s in (1, 512, 4096, 65536)),
    *(Case(tokens=n, sequences=s) for n in (512, 2048, 8192, 32768) for s in (1, 32)),
    Case(tokens=262144),
]


def gather_call(case):
    """Our call."""
    pages = math.ceil(case.tokens / case.page_size) + case.sequences
    used = math.ceil(case.tokens / case.sequences / case.page_size) + 1
    shape = {
        "interleaved": (2 * pages, case.page_size, 2 * KV_HEADS, case.head_dim),
        "stacked": (2, 2 * pages, case.page_size, KV_HEADS, case.head_dim),
        "per_page": (2 * pages, 2, case.page_size, KV_HEADS, case.head_dim),
        "split": (2 * pages, case.page_size, KV_HEADS, case.head_dim),
    }[case.layout]

    def random_cache():
        # Random bits, because copying equal numbers takes less power.
        words = torch.randint(-(2**31), 2**31, (math.prod(shape) * DTYPES[case.cache].itemsize // 4,), device="cuda")
        return words.to(torch.int32).view(DTYPES[case.cache]).view(shape)

    cache = (random_cache(), random_cache()) if case.layout == "split" else random_cache()
    lens = torch.full((case.sequences,), case.tokens // case.sequences, dtype=torch.int32, device="cuda")
    # Random pages; sequences without tokens have none.
    order = torch.randperm(2 * pages, device="cuda", dtype=torch.int32)
    tables = order[torch.arange(case.sequences * used, device="cuda") % len(order)].view(case.sequences, used)
    scales = [None if case.scale is None else torch.tensor([case.scale], device="cuda")] * 2
    return functools.partial(
        xt.gather_kv_cache,
        cache,
        tables,
        lens,
        capacity=case.tokens,
        dtype=DTYPES[case.out or case.cache],
        k_scale=scales[0],
        v_scale=scales[1],
        kv_layout=None if case.layout == "split" else case.layout,
    )


def main(*words):
    """Run the cases; prints a line per case, then JSON."""
    only, rows = " ".join(words), []
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(1)
        from_bytes = torch.randint(0, 256, (case.bytes() // 2,), dtype=torch.uint8, device="cuda")
        to_bytes = torch.empty_like(from_bytes)
        times = milliseconds({"ours": gather_call(case), "copy": functools.partial(to_bytes.copy_, from_bytes)})
        torch.cuda.empty_cache()
        cells = "".join(f" | {name} {1e3 * ms:.2f} us {case.bytes() / ms / 1e6:.0f} GB/s" for name, ms in times.items())
        print(f"{case.name:70}{cells}  ours {times['copy'] / times['ours']:.3f}x a copy", flush=True)
        rows.append({"case": case.name} | {name: round(1e3 * ms, 2) for name, ms in times.items()})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "us": rows}))


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
