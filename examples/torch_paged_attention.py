"""Paged attention as a PyTorch operator: eager, lazy on XLA, and compiled.

    python examples/torch_paged_attention.py [cpu | cuda | xla]

The batch has a prompt of four tokens and a sequence that is being generated.
"""

import sys

import torch

from xla_attention.torch import update_cache_, xla_gpu_paged_attention


def main(device: str = "cpu") -> None:
    """Run the example on a device."""
    if device == "xla":
        import torch_xla  # noqa: F401  defines the device

    torch.manual_seed(0)
    q_heads, kv_heads, head_dim, page_size = 8, 2, 64, 16
    kv_cache = torch.zeros(32, page_size, 2 * kv_heads, head_dim, device=device)
    query = torch.randn(5, q_heads, head_dim).to(device)
    key, value = (torch.randn(5, kv_heads, head_dim).to(device) for _ in range(2))

    def on_device(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(device)

    # The prompt has page 3; the other sequence has nine tokens in page 7 and gets its tenth.
    slot_mapping = on_device(48, 49, 50, 51, 7 * page_size + 9)
    context_lens, query_start_loc, num_seqs = on_device(4, 10), on_device(0, 4, 5), on_device(2)
    block_tables = on_device(3, 7).reshape(2, 1)
    update_cache_(kv_cache, key, value, slot_mapping)

    output = xla_gpu_paged_attention(
        query=query,
        kv_cache=kv_cache,
        context_lens=context_lens,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        num_seqs=num_seqs,
        scale=head_dim**-0.5,
        sliding_window=None,
        soft_cap=None,
    )
    metadata = (context_lens, block_tables, query_start_loc, num_seqs)
    same = torch.ops.xla_gpu.paged_attention(query, kv_cache, *metadata, head_dim**-0.5)
    print("the operator and the function agree:", torch.equal(output.cpu(), same.cpu()))

    @torch.compile(backend="openxla" if device == "xla" else "inductor", fullgraph=True)
    def step(query: torch.Tensor, kv_cache: torch.Tensor, *metadata: torch.Tensor) -> torch.Tensor:
        return xla_gpu_paged_attention(query, kv_cache, *metadata, scale=head_dim**-0.5)

    compiled = step(query, kv_cache, *metadata)
    print("compiled and eager agree:", torch.allclose(compiled.cpu(), output.cpu(), atol=1e-6))
    # The first token of the prompt attends only to itself, so that its output is its value.
    print("the first token's output is its value:", torch.allclose(output[0, 0].cpu(), value[0, 0].cpu(), atol=1e-6))


if __name__ == "__main__":
    main(*sys.argv[1:])
