"""An engine without a device: a step ends `step_seconds` after the one before it, in which the interpreter is free.

Scheduling and the arrays of a batch are the real engine's, so its Python per step is measured without a GPU.
"""

import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tokenizers import Tokenizer, models

from llama.batch import BatchBuilder
from llama.config import LlamaConfig
from llama.engine import Engine, EngineConfig, EngineStats
from llama.programs import Results
from llama.tokenizer import ChatTokenizer

VOCABULARY = 4096


class DeviceTokens:
    """Tokens that a step predicts, known from the time `end`."""

    def __init__(self, shape: tuple[int, int], end: float) -> None:
        self.shape, self.end = shape, end

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(self.end - time.perf_counter(), 0))
        return np.broadcast_to(np.arange(self.shape[1], dtype=np.int32), self.shape)


class StubPrograms:
    """Launches nothing; after `num_steps` steps it fails."""

    def __init__(self, step_seconds: float, num_steps: float) -> None:
        self._step_seconds, self._left, self._end = step_seconds, num_steps, 0.0
        self._thread = ThreadPoolExecutor(1)

    def is_compiled(self, _bucket: int, _samples: bool, _num_steps: int = 1) -> bool:
        """There is nothing to compile."""
        return True

    def launch(
        self, bucket: int, packed: np.ndarray, _samples: bool, _logprobs: bool, follows: bool
    ) -> Future[Results]:
        """A token for each row of each step."""
        return self._thread.submit(self._launch, (len(packed), bucket), follows)

    def _launch(self, shape: tuple[int, int], follows: bool) -> Results:
        num_steps, _ = shape
        if self._left <= 0:
            raise RuntimeError("the device is lost")
        self._left -= num_steps
        now = time.perf_counter()
        is_late = follows and now >= self._end
        self._end = max(now, self._end) + num_steps * self._step_seconds
        return Results(DeviceTokens(shape, self._end), None, is_late)


class StubEngine(Engine):
    """Gives sequence i of a step the token i; after `num_steps` steps it fails."""

    def __init__(self, sizes: EngineConfig, step_seconds: float, num_steps: float = math.inf) -> None:
        self.config = LlamaConfig(1, 8, 8, 1, 1, 8, VOCABULARY, 8192, 1e-5, 1e4)
        self.sizes, self.stats = sizes, EngineStats()
        self.max_pages_per_seq = min(sizes.num_pages, -(-self.config.context_length // sizes.page_size))
        self.scheduler = self.new_scheduler(sizes.num_pages, sizes.token_budget, frozenset())
        self._builder = BatchBuilder(sizes.max_num_seqs, self.max_pages_per_seq, sizes.page_size)
        self._programs = StubPrograms(step_seconds, num_steps)
        self._in_flight = deque()
        self._last_read = 0.0


def word_tokenizer() -> ChatTokenizer:
    """Token i is the word wi."""
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    return ChatTokenizer(Tokenizer(words), frozenset())
