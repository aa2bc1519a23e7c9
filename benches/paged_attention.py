"""paged_attention beside its peers on one GPU: the decode, prefill and mixed cases of SPEC section 4.

GB/s counts every K and V byte of the contexts once; TFLOP/s counts causal products once (half of the square).
"""

import json
import random
from dataclasses import dataclass, field

import torch

import peers
from harness import flash_attn_varlen, graph_time_us, paged_attention


@dataclass
class Case:
    """A ragged batch: (new tokens, context) of each sequence."""

    name: str
    q_lens: list[int]
    lens: list[int]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    calls: int = 5
    causal: bool = True
    window: int = -1
    tables: torch.Tensor = field(init=False)
    query_start_loc: torch.Tensor = field(init=False)

    def is_ragged(self):
        return len(set(self.lens)) > 1 or len(set(self.q_lens)) > 1

    def kv_bytes(self):
        return 2 * 2 * sum(self.lens) * self.kv_heads * self.head_dim

    def flops(self):
        pairs = sum(q * (k - q) + q * (q + 1) / 2 for q, k in zip(self.q_lens, self.lens, strict=True))
        return 4 * pairs * self.q_heads * self.head_dim

    def rate(self, us, contender=""):
        """What the time means: GB/s where one token a sequence is decoded, TFLOP/s elsewhere."""
        if max(self.q_lens) <= 4:
            size = self.kv_bytes() // (2 if "float8" in contender else 1)
            return f"{size / us / 1e3:6.0f} GB/s"
        return f"{self.flops() / us / 1e6:6.0f} TFLOP/s"


def decode(name, lens, **options):
    return Case(name, [1] * len(lens), lens, **options)


random.seed(0)
RAGGED = [random.randrange(1024, 32768) for _ in range(16)]
PREFILL_RAGGED = [4096, 1024, 512, 2048, 3000, 100, 5604]
CASES = [
    decode("decode 64 x 8k", [8192] * 64),
    decode("decode 16 ragged 1k-32k", RAGGED),
    decode("decode 1 x 128k", [131072]),
    decode("decode 32 x 4k, 32/32", [4096] * 32, kv_heads=32),
    decode("decode 128 x 2k, 64/8", [2048] * 128, q_heads=64),
    decode("decode 8 x 512", [512] * 8, calls=20),
    Case("64 x 4 queries over 4k", [4] * 64, [4096] * 64),
    Case("prefill 4 x 4k, 32/8", [4096] * 4, [4096] * 4),
    Case("prefill 4 x 4k, 16/16", [4096] * 4, [4096] * 4, q_heads=16, kv_heads=16),
    Case("prefill 4 x 4k, d64", [4096] * 4, [4096] * 4, head_dim=64),
    Case("prefill 4 x 4k, d256", [4096] * 4, [4096] * 4, q_heads=16, kv_heads=8, head_dim=256),
    Case("ragged prefill 16k", PREFILL_RAGGED, PREFILL_RAGGED),
    Case("chunked 8 x 512 over 8k", [512] * 8, [8192] * 8),
    Case("mixed 4 x 2k + 60 x 4k", [2048] * 4 + [1] * 60, [2048] * 4 + [4096] * 60),
]


def data(case):
    """Random normal query and pages, shuffled page numbers; K and V interleaved and apart."""
    torch.manual_seed(len(case.name))
    used = [-(-n // case.page_size) for n in case.lens]
    order = torch.randperm(sum(used) + 1, dtype=torch.int32)
    tables = torch.zeros((len(used), max(used)), dtype=torch.int32)
    start = 0
    for i, n in enumerate(used):
        tables[i, :n] = order[start : start + n]
        start += n
    case.tables = tables.cuda()
    case.query_start_loc = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32).cuda()
    shape = (sum(used) + 1, case.page_size, case.kv_heads, 2, case.head_dim)
    kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    query = torch.randn((sum(case.q_lens), case.q_heads, case.head_dim), device="cuda", dtype=torch.bfloat16)
    return query, kv


def contiguous(case, pages):
    """K or V of all sequences one after the other, out of its pages."""
    per = [pages[case.tables[i, : -(-n // case.page_size)].long()].flatten(0, 1)[:n] for i, n in enumerate(case.lens)]
    return torch.cat(per)


def run_case(case):
    """Microseconds by contender, ours first and once more at the end."""
    query, kv = data(case)
    scale = case.head_dim**-0.5
    lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
    count = torch.tensor([len(case.lens)], dtype=torch.int32, device="cuda")
    cache = kv.flatten(2, 3)
    metadata = (lens, case.tables, case.query_start_loc, count)
    ours = paged_attention(query, cache, *metadata, scale=scale)
    wanted = ours().clone()
    times = {"ours": graph_time_us(ours, case.calls)}
    k_pages, v_pages = kv[..., 0, :].contiguous(), kv[..., 1, :].contiguous()
    contenders = {name: (prepare, k_pages, v_pages) for name, prepare in peers.PAGED.items()}
    if case.q_lens == case.lens:
        starts = (case.query_start_loc, case.query_start_loc)
        packed = (contiguous(case, k_pages), contiguous(case, v_pages), *starts)
        contenders |= {f"{name}, packed keys": (prepare, *packed) for name, prepare in peers.PREFILL.items()}
    for name, (prepare, *operands) in contenders.items():
        try:
            run = prepare(case, query, *operands)
            if run is None:
                continue
            result = run()
            result = (result if torch.is_tensor(result) else result[0]).reshape(query.shape)
            error = (result.float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 2e-2, f"differs from ours by {error:.1e}"
            times[name] = graph_time_us(run, case.calls)
        except Exception as error:
            print(f"  {name} did not run: {type(error).__name__}: {str(error)[:160]}")
    for name, run in forms_of_ours(case, query, cache, metadata, wanted).items():
        times[f"ours, {name}"] = graph_time_us(run, case.calls)
    times["ours, again"] = graph_time_us(ours, case.calls)
    return times


def forms_of_ours(case, query, cache, metadata, wanted):
    """The same work asked for in other ways: batch invariant, over an 8-bit cache, over packed keys."""
    scale = case.head_dim**-0.5
    forms = {"batch_invariant": paged_attention(query, cache, *metadata, scale=scale, batch_invariant=True)}
    if max(case.q_lens) == 1:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            eight_bit = paged_attention(query, cache.to(dtype), *metadata, scale=scale)
            forms[str(dtype).removeprefix("torch.")] = eight_bit
    if case.q_lens == case.lens:
        k, v = (contiguous(case, cache[:, :, which::2]) for which in (0, 1))
        forms["packed keys"] = flash_attn_varlen(query, k, v, case.query_start_loc, causal=True)
        assert torch.equal(forms["packed keys"](), wanted), "packed and paged keys give other bits"
    return forms


def main(only=""):
    """Run the cases whose name contains `only`; a line for each, then the same as JSON."""
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        times = run_case(case)
        torch.cuda.empty_cache()
        best = min((t for n, t in times.items() if not n.startswith("ours")), default=None)
        ratio = f"  ours {best / min(times['ours'], times['ours, again']):.2f}x the best peer" if best else ""
        print(f"{case.name:26}" + "".join(f" | {n} {t:.1f} us {case.rate(t, n)}" for n, t in times.items()) + ratio)
        rows.append({"case": case.name, "us": times, "kv_bytes": case.kv_bytes(), "flops": case.flops()})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
