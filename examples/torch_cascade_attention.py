"""Cascade attention in torch: sequences with a common long prefix read its keys and values only once.

    python examples/torch_cascade_attention.py [cpu | cuda | xla]

Requests often share a system prompt, whose pages are in all their block tables; paged_attention reads these pages once
per sequence. Here, flash_attn_varlen attends to the prefix with the queries of all sequences as one sequence,
paged_attention attends to the suffix of each sequence, and merge_attention_states merges both.
"""

import sys
import time

import torch

from xla_attention.torch import flash_attn_varlen, merge_attention_states, paged_attention

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16


def batch(device: str, prefix_pages: int, suffix_lens: list[int], q_lens: list[int]) -> dict[str, torch.Tensor]:
    """A paged cache with a shared prefix, suffixes of `suffix_lens` tokens, queries for the last `q_lens` of each."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    seqs = len(suffix_lens)
    suffix_pages = -(-max(suffix_lens) // PAGE_SIZE)

    def on_device(numbers: list[int] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=torch.int32).to(device)

    num_pages = prefix_pages + seqs * suffix_pages
    pages = torch.randperm(num_pages)  # pages in random order
    own = pages[prefix_pages:].reshape(seqs, suffix_pages)
    shared = pages[:prefix_pages].reshape(1, prefix_pages)
    lens, starts = torch.tensor(suffix_lens), torch.tensor([0, *q_lens]).cumsum(0)
    return {
        "query": torch.randn(sum(q_lens), Q_HEADS, HEAD_DIM, dtype=dtype).to(device),
        # [P, page_size, 2*Hkv, D]: K of head h at index 2h, V at 2h+1
        "kv_cache": torch.randn(num_pages, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM, dtype=dtype).to(device),
        "query_start_loc": on_device(starts),
        "num_seqs": on_device([seqs]),
        "shared_table": on_device(shared),
        "own_tables": on_device(own),
        "whole_tables": on_device(torch.cat([shared.expand(seqs, -1), own], dim=1)),
        "prefix_len": on_device([prefix_pages * PAGE_SIZE]),
        "suffix_lens": on_device(lens),
        "whole_lens": on_device(lens + prefix_pages * PAGE_SIZE),
        "all_queries": on_device([0, sum(q_lens)]),
    }


def plain(b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every sequence over its whole context."""
    metadata = (b["whole_lens"], b["whole_tables"], b["query_start_loc"], b["num_seqs"])
    return paged_attention(b["query"], b["kv_cache"], *metadata, HEAD_DIM**-0.5)


def cascade(b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The prefix with all queries at once, the suffix per sequence, and both merged."""
    # Not causal, because the prefix precedes every query.
    over_prefix = flash_attn_varlen(
        b["query"],
        b["kv_cache"],
        None,
        b["all_queries"],
        seqused_k=b["prefix_len"],
        block_table=b["shared_table"],
        kv_layout="interleaved",
        return_lse=True,
    )
    # The queries are the last tokens of the suffix, so that paged_attention's causal mask is right.
    metadata = (b["suffix_lens"], b["own_tables"], b["query_start_loc"], b["num_seqs"])
    over_suffix = paged_attention(b["query"], b["kv_cache"], *metadata, HEAD_DIM**-0.5, return_lse=True)
    out, _ = merge_attention_states(*over_prefix, *over_suffix)
    return out


def microseconds(step) -> float:  # noqa: ANN001
    """The average time of a step in a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start = time.perf_counter()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e4


def main(device: str = "cpu") -> None:
    """Compare both implementations."""
    if device == "xla":
        import torch_xla  # noqa: F401  defines the device

    torch.manual_seed(0)
    # Decode tokens and one chunk of a prompt over a prefix of 2048 tokens; on a GPU, 64 sequences over 16384.
    seqs, prefix_pages = (64, 1024) if device == "cuda" else (6, 128)
    suffix_lens = [40 + 7 * i % 90 for i in range(seqs)]
    q_lens = [5] + [1] * (seqs - 1)
    b = batch(device, prefix_pages, suffix_lens, q_lens)

    expected, out = plain(b).cpu().float(), cascade(b).cpu().float()
    difference = (out - expected).abs().max().item()
    print(f"largest difference: {difference:.1e}")
    print("both ways agree:", difference < (1e-5 if device == "cpu" else 2e-2))

    # The bytes of K and V that each implementation reads: sequences share pages, but each sequence reads them.
    token = 2 * KV_HEADS * HEAD_DIM * b["kv_cache"].element_size()
    prefix = prefix_pages * PAGE_SIZE
    implementations = {"plain": (plain, seqs * prefix), "cascade": (cascade, prefix)}
    for name, (attention, prefix_tokens) in implementations.items():
        line = f"{name}: {(prefix_tokens + sum(suffix_lens)) * token} bytes of K and V"
        if device == "cuda":
            line += f", {microseconds(lambda attention=attention: attention(b)):.1f} us"
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
