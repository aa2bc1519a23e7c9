"""An engine without a device: a step ends `step_seconds` after the one before it, in which the interpreter is free.

Scheduling and the arrays of a batch are the real engine's, so its Python per step is measured without a GPU.
"""

import math
import time

import numpy as np
from tokenizers import Tokenizer, models

from llama.batch import BatchBuilder, pack
from llama.config import LlamaConfig
from llama.engine import Engine, EngineConfig, EngineStats, Launched
from llama.scheduler import Chunk
from llama.tokenizer import ChatTokenizer

VOCABULARY = 4096


class DeviceTokens:
    """Tokens that a step predicts, known from the time `end`."""

    def __init__(self, count: int, end: float) -> None:
        self.count, self.end = count, end

    def is_ready(self) -> bool:
        """Whether the device has computed them."""
        return time.perf_counter() >= self.end

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(self.end - time.perf_counter(), 0))
        return np.arange(self.count, dtype=np.int32)


class StubEngine(Engine):
    """Gives sequence i of a step the token i; after `num_steps` steps it fails."""

    def __init__(self, sizes: EngineConfig, step_seconds: float, num_steps: float = math.inf) -> None:
        self.config = LlamaConfig(1, 8, 8, 1, 1, 8, VOCABULARY, 8192, 1e-5, 1e4)
        self.sizes, self.stats = sizes, EngineStats()
        self.max_pages_per_seq = min(sizes.num_pages, -(-self.config.context_length // sizes.page_size))
        self.scheduler = self.new_scheduler(sizes.num_pages, sizes.token_budget, frozenset())
        self._builder = BatchBuilder(sizes.max_num_seqs, self.max_pages_per_seq, sizes.page_size)
        self._in_flight: Launched | None = None
        self._step_seconds, self._last_read, self._end = step_seconds, 0.0, 0.0
        self._num_steps = num_steps

    def _launch(self, chunks: list[Chunk], _: object) -> Launched:
        if self.stats.num_steps >= self._num_steps:
            raise RuntimeError("the device is lost")
        start = time.perf_counter()
        pack(self._builder.build(chunks, self._bucket(sum(chunk.length for chunk in chunks))))
        self.stats.late_steps += self._in_flight is not None and self._in_flight.tokens.is_ready()
        self._end = max(time.perf_counter(), self._end) + self._step_seconds
        self.scheduler.advance(chunks)
        return Launched(chunks, start, DeviceTokens(len(chunks), self._end), None)


def word_tokenizer() -> ChatTokenizer:
    """Token i is the word wi."""
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    return ChatTokenizer(Tokenizer(words), frozenset())
