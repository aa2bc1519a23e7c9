"""The cases of the prefill benchmarks, for torch and JAX."""

from dataclasses import dataclass


@dataclass
class Case:
    """A batch of sequences; paged cases have interleaved caches with shuffled pages."""

    name: str
    q_lens: list[int]
    lens: list[int]
    q_heads: int
    kv_heads: int
    head_dim: int = 128
    value_dim: int = 0  # 0 is head_dim
    causal: bool = True
    window: int = -1
    page_size: int = 0
    fp8: bool = False  # q, K and V of e4m3fn
    softcap: float = 0.0  # 0 is none

    def __post_init__(self):
        self.value_dim = self.value_dim or self.head_dim

    def is_ragged(self):
        """Whether lengths differ between sequences."""
        return len(set(self.lens)) > 1 or len(set(self.q_lens)) > 1

    def flops(self):
        """Operations of both products for all visible pairs of query and key."""

        def pairs(q, k):
            if not self.causal:
                return q * k
            # Query i has position i + k - q, and attends to the key there and `window` keys before it.
            if self.window < 0:
                return q * (k - q) + q * (q + 1) / 2
            return sum(min(i + k - q, self.window) + 1 for i in range(q))

        return 2 * sum(map(pairs, self.q_lens, self.lens)) * self.q_heads * (self.head_dim + self.value_dim)


def dense(head_dim, value_dim, causal, fp8=False, softcap=0.0):
    """16k tokens in sequences of one length, with as many heads as make up 2048 columns."""
    heads, word = 2048 // head_dim, "causal" if causal else "full"
    dims = f"d{head_dim}" if head_dim == value_dim else f"d{head_dim}/{value_dim}"
    for length in (1024, 4096, 16384):
        lens = [length] * (16384 // length)
        name = f"{'fp8 ' if fp8 else ''}{'softcap ' if softcap else ''}{dims} {word} {length}"
        yield Case(name, lens, lens, heads, heads, head_dim, value_dim, causal, fp8=fp8, softcap=softcap)


DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
RAGGED = [4096, 1024, 512, 2048, 3000, 100, 5604]
CASES = [
    *(case for dims in DIMS for causal in (False, True) for case in dense(*dims, causal)),
    Case("ragged 16k", RAGGED, RAGGED, 32, 8),
    *(Case(f"ragged 16k, page {size}", RAGGED, RAGGED, 32, 8, page_size=size) for size in (1, 4, 16, 128)),
    *(Case(f"chunked 8 x 512, page {size}", [512] * 8, [8192] * 8, 32, 8, page_size=size) for size in (16, 128)),
    *(case for dim in (128, 256) for causal in (False, True) for case in dense(dim, dim, causal, fp8=True)),
    *(case for dim in (64, 128, 256) for causal in (False, True) for case in dense(dim, dim, causal, softcap=30.0)),
    Case("window 1k over 16k", [16384], [16384], 16, 16, window=1023),
]
