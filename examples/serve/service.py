"""The engine in a thread of its own: requests come in by an inbox, tokens go out to the event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llama.engine import Engine
from llama.scheduler import Sequence

from .metrics import Metrics


class QueueFullError(RuntimeError):
    """As many requests as the server holds are running or waiting."""


class EngineDeadError(RuntimeError):
    """The engine's thread has ended with an exception."""


@dataclass(eq=False)
class Generation:
    """One sequence in the engine.

    Attributes
    ----------
        tokens: generated ids in order, then None at the end, or the exception that ended the engine.
    """

    prompt: list[int]
    max_new_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)
    sequence: Sequence | None = None
    num_sent: int = 0  # by the thread
    num_taken: int = 0  # by the event loop
    started: float = field(default_factory=time.perf_counter)
    last_token: float = 0.0

    def send(self, item: int | Exception | None) -> None:
        """Hand one item to the event loop."""
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, item)


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
        self._active: list[Generation] = []  # of the thread: what the scheduler holds
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompts: list[list[int]], max_new_tokens: int) -> list[Generation]:
        """Queue the sequences of one request, all or none."""
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        if len(self._open) + len(prompts) > self._limit:
            raise QueueFullError(f"{len(self._open)} sequences are running or waiting, at most {self._limit} can")
        loop = asyncio.get_running_loop()
        generations = [Generation(prompt, max_new_tokens, loop) for prompt in prompts]
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
        generation.sequence = self._engine.add(generation.prompt, generation.max_new_tokens)
        self._active.append(generation)

    def _cancel(self, generation: Generation) -> None:
        if generation in self._active:
            self._active.remove(generation)
            self._engine.scheduler.cancel(generation.sequence)

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self._engine.scheduler.has_work:
                    self._engine.step()
                    self._publish()
                self._metrics.observe(self._engine.scheduler)
        except BaseException as error:
            self.error = error
            for generation in list(self._open):
                generation.send(EngineDeadError(str(error)))
            raise

    def _take_messages(self) -> bool:
        """Handle the inbox, waiting for a message while there is nothing to compute; False when it says to end."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.scheduler.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            if self._inbox.empty():
                return True

    def _publish(self) -> None:
        now = time.perf_counter()
        for generation in list(self._active):
            sequence = generation.sequence
            count = len(sequence.tokens) - sequence.prompt_length
            if count > generation.num_sent:
                self._metrics.token(now - (generation.last_token or generation.started), first=generation.num_sent == 0)
                generation.last_token = now
                for token in sequence.tokens[sequence.prompt_length + generation.num_sent :]:
                    generation.send(token)
                generation.num_sent = count
        for sequence in self._engine.scheduler.finished:
            generation = next(generation for generation in self._active if generation.sequence is sequence)
            self._active.remove(generation)
            generation.send(None)
        self._engine.scheduler.finished.clear()
