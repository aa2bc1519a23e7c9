"""The engine in a thread of its own: requests come in by an inbox, tokens go out to the event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llama.engine import Engine, Token
from llama.sampling import Sampling
from llama.scheduler import Sequence

from .metrics import Metrics

# Tokens go out at most this often per running sequence, so that writing them, 0.15 ms each time, leaves time to the
# engine's thread: to 64 clients every 32 ms. First and last tokens go out at once.
DELIVERY_SECONDS = 0.5e-3


class QueueFullError(RuntimeError):
    """As many requests as the server holds are running or waiting."""


class EngineDeadError(RuntimeError):
    """The engine's thread has ended with an exception."""


@dataclass(frozen=True)
class Prompt:
    """What one sequence continues, and how."""

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]


@dataclass(eq=False)
class Generation:
    """One sequence in the engine; of the event loop but for `sequence` and what follows it, which the thread has."""

    prompt: Prompt
    loop: asyncio.AbstractEventLoop
    num_taken: int = 0  # tokens that the text is made of
    _items: list[Token | Exception | None] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    sequence: Sequence | None = None
    started: float = field(default_factory=time.perf_counter)
    last_token: float = 0.0
    unsent: list[Token | Exception | None] = field(default_factory=list)

    def put(self, items: list[Token | Exception | None]) -> None:
        """Add items, on the event loop: tokens in order, then None, or the exception that ended the engine."""
        self._items += items
        self._arrived.set()

    async def take(self) -> list[Token | Exception | None]:
        """All items that have arrived, at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        items, self._items = self._items, []
        return items


def put_all(deliveries: list[tuple[Generation, list[Token | Exception | None]]]) -> None:
    """Hand out the items of one step."""
    for generation, items in deliveries:
        generation.put(items)


class Service:
    """Owns the engine; `submit` and `cancel` are called on the event loop, everything else happens in the thread.

    Attributes
    ----------
        capacity: the largest number of tokens of a prompt and what is generated for it.
        error: why the engine's thread ended, or None.
    """

    def __init__(self, engine: Engine, metrics: Metrics, max_waiting: int) -> None:
        pages = min(engine.sizes.num_pages, engine.max_pages_per_seq)
        self.capacity = min(engine.config.context_length, pages * engine.sizes.page_size)
        self.error: BaseException | None = None
        self._engine = engine
        self._metrics = metrics
        self._limit = engine.sizes.max_num_seqs + max_waiting
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Generation] = set()  # of the event loop: what is submitted and not yet closed
        self._active: dict[Sequence, Generation] = {}  # of the thread: what the scheduler holds
        self._unsent: set[Generation] = set()  # of the thread, as the next
        self._next_delivery = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompts: list[Prompt]) -> list[Generation]:
        """Queue the sequences of one request, all or none."""
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        if len(self._open) + len(prompts) > self._limit:
            raise QueueFullError(f"{len(self._open)} sequences are running or waiting, at most {self._limit} can")
        loop = asyncio.get_running_loop()
        generations = [Generation(prompt, loop) for prompt in prompts]
        self._open.update(generations)
        if self.error is not None:  # it ended meanwhile, and may have told only those before
            raise EngineDeadError(str(self.error))
        for generation in generations:
            self._inbox.put(lambda generation=generation: self._add(generation))
        return generations

    def close(self, generation: Generation) -> None:
        """Forget a generation, and cancel it if it has not ended."""
        if generation in self._open:
            self._open.remove(generation)
            self._inbox.put(lambda: self._cancel(generation))

    def stop(self) -> None:
        """End the thread after its current step."""
        self._inbox.put(None)
        self._thread.join()

    def _add(self, generation: Generation) -> None:
        prompt = generation.prompt
        generation.sequence = self._engine.add(
            prompt.tokens, prompt.max_new_tokens, prompt.sampling, prompt.stop_tokens
        )
        self._active[generation.sequence] = generation
        self._metrics.prompt_tokens.inc(len(prompt.tokens))

    def _cancel(self, generation: Generation) -> None:
        if self._active.pop(generation.sequence, None):
            self._unsent.discard(generation)
            self._engine.scheduler.cancel(generation.sequence)

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self._engine.has_work:
                    self._publish(self._engine.step())
                self._metrics.observe(self._engine)
        except BaseException as error:
            self.error = error
            for generation in list(self._open):
                generation.loop.call_soon_threadsafe(generation.put, [EngineDeadError(str(error))])
            raise

    def _take_messages(self) -> bool:
        """Handle the inbox, waiting for a message while there is nothing to compute; False when it says to end."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            if self._inbox.empty():
                return True

    def _publish(self, tokens: list[Token]) -> None:
        """Keep the tokens of one step, and send what is due, with one call per event loop."""
        now = time.perf_counter()
        due: set[Generation] = set()
        intervals: dict[float, int] = {}  # how many tokens came so long after the one before; few values differ
        for token in tokens:
            generation = self._active[token.sequence]
            generation.unsent.append(token)
            if generation.last_token:
                seconds = now - generation.last_token
                intervals[seconds] = intervals.get(seconds, 0) + 1
            else:
                self._metrics.first.observe(now - generation.started)
                due.add(generation)
            generation.last_token = now
            if token.sequence.is_done:
                del self._active[token.sequence]
                generation.unsent.append(None)
                due.add(generation)
            self._unsent.add(generation)
        self._metrics.tokens.inc(len(tokens))
        for seconds, count in intervals.items():
            self._metrics.between.observe(seconds, count)
        self._engine.scheduler.finished.clear()
        if now >= self._next_delivery:
            self._next_delivery = now + DELIVERY_SECONDS * len(self._unsent)
            due = self._unsent
        self._unsent = self._unsent - due
        deliveries: dict[asyncio.AbstractEventLoop, list] = {}
        for generation in due:
            items, generation.unsent = generation.unsent, []
            deliveries.setdefault(generation.loop, []).append((generation, items))
        for loop, of_loop in deliveries.items():
            loop.call_soon_threadsafe(put_all, of_loop)
