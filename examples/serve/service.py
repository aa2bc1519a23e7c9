"""The loop of the engine's process: computes steps, and between them talks to the front processes without waiting."""

import math
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from llama.engine import Engine, Token
from llama.scheduler import Sequence

from .messages import Decoder, Delivery, EngineDeadError, Logprobs, Prompt, QueueFullError, encode
from .metrics import Latencies, Snapshot

# A front gets tokens at most this often per sequence that it has some of, so that it can write the events of one
# message before the next comes. First and last tokens go out after their step.
DELIVERY_SECONDS = 0.2e-3
# For a front to end after its open answers were cut off.
CLOSING_SECONDS = 5
MAX_READ = 1 << 20


class Front:
    """The engine's end of the socket to one front process, and what the engine computes for it.

    Attributes
    ----------
        generations: by id, what is computed.
        unsent: ids of those with tokens that are still here; `urgent` are those whose tokens should not wait.
        next_delivery: when the others go out.
        is_ready: whether it accepts connections.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.generations: dict[int, Generation] = {}
        self.unsent: dict[Generation, None] = {}
        self.urgent: dict[Generation, None] = {}
        self.next_delivery = 0.0
        self.is_ready = False
        self._decoder = Decoder()
        self._buffer = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether the socket has not taken all that was sent."""
        return bool(self._buffer)

    def send(self, message: tuple) -> None:
        """Send as much as the socket takes; the rest goes by `flush`."""
        self._buffer += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send more of the rest."""
        try:
            while self._buffer:
                del self._buffer[: self.connection.send(self._buffer)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which `receive` finds
            self._buffer.clear()

    def receive(self) -> list[tuple] | None:
        """The messages that have arrived; None after the process has ended."""
        try:
            data = self.connection.recv(MAX_READ)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._decoder.feed(data)) if data else None


@dataclass(eq=False, slots=True)
class Generation:
    """One sequence in the engine; `tokens` and `logprobs` are those that the front does not have yet."""

    id: int
    front: Front
    started: float
    sequence: Sequence
    last_token: float = 0.0
    is_done: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def take(self) -> Delivery:
        """What the front does not have yet; it counts as sent."""
        delivery = self.id, self.tokens, self.logprobs or None, self.is_done
        self.tokens, self.logprobs = [], []
        return delivery


def capacity_of(engine: Engine) -> int:
    """The largest number of tokens of a prompt and what is generated for it."""
    pages = min(engine.sizes.num_pages, engine.max_pages_per_seq)
    return min(engine.config.context_length, pages * engine.sizes.page_size)


class Service:
    """Owns the engine.

    Attributes
    ----------
        error: why the engine has ended, or None; the server then answers 503 until it is stopped.
        lost_front: the index of the first front process that ended without being told to, or None.
        signal: the signal that ended `run`, or None.
    """

    def __init__(
        self,
        engine: Engine,
        connections: list[socket.socket],
        max_waiting: int,
        drain_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        self.error: str | None = None
        self.lost_front: int | None = None
        self.signal: int | None = None
        self._engine = engine
        self._limit = engine.sizes.max_num_seqs + max_waiting
        self._drain_seconds = drain_seconds
        self._announce = on_ready
        self._active: dict[Sequence, Generation] = {}
        self._prompt_tokens = self._generation_tokens = 0
        self._first, self._between = Latencies(), Latencies()
        self._deadline = math.inf
        self._all_fronts = [Front(connection) for connection in connections]
        self._fronts = list(self._all_fronts)
        self._selector = selectors.DefaultSelector()
        for front in self._fronts:
            self._selector.register(front.connection, selectors.EVENT_READ, front)

    def run(self, signals: socket.socket) -> None:
        """Serve until a byte comes from `signals` (the number of a signal) or a front process ends, then drain.

        Open answers may go on for `drain_seconds`. A second signal ends it at once.
        """
        self._selector.register(signals, selectors.EVENT_READ)
        while self._fronts and time.perf_counter() < self._deadline:
            is_busy = self.error is None and self._engine.has_work
            left = self._deadline - time.perf_counter()
            for key, events in self._selector.select(0 if is_busy else None if left == math.inf else left):
                if key.data is None:
                    for number in signals.recv(64):
                        self._stop(number)
                else:
                    self._serve(key.data, events)
            if is_busy:
                try:
                    self._publish(self._engine.step())
                except Exception as error:
                    self._fail(error)

    def _stop(self, number: int | None) -> None:
        """Begin the drain, because of signal `number` or of a front process that has ended."""
        if self._deadline < math.inf:
            self._deadline = 0.0 if number is not None else self._deadline
        else:
            self._deadline = time.perf_counter() + self._drain_seconds + CLOSING_SECONDS
            for front in list(self._fronts):
                self._send(front, ("stop",))
        self.signal = self.signal or number

    def _fail(self, error: Exception) -> None:
        traceback.print_exception(error)
        self.error = f"the engine has ended: {type(error).__name__}: {error}"
        self._active.clear()
        for front in self._fronts:
            front.generations, front.unsent, front.urgent = {}, {}, {}
            self._send(front, ("fail", self.error))

    def _serve(self, front: Front, events: int) -> None:
        """Read from a front, and write to one that was behind."""
        if events & selectors.EVENT_READ:
            messages = front.receive()
            if messages is None:
                self._lose(front)
                return
            for kind, *values in messages:
                getattr(self, f"_on_{kind}")(front, *values)
        if events & selectors.EVENT_WRITE:
            front.flush()
            self._deliver(front, time.perf_counter())
            self._watch(front)

    def _send(self, front: Front, message: tuple) -> None:
        was_behind = front.is_behind
        front.send(message)
        if front.is_behind != was_behind:
            self._watch(front)

    def _watch(self, front: Front) -> None:
        """Have the selector tell when a front that is behind takes more."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.is_behind else 0)
        self._selector.modify(front.connection, events, front)

    def _lose(self, front: Front) -> None:
        """A front process has ended: cancel what it asked for."""
        self._selector.unregister(front.connection)
        front.connection.close()
        self._fronts.remove(front)
        for number in list(front.generations):
            self._on_cancel(front, number)
        if self._deadline == math.inf:
            self.lost_front = self._all_fronts.index(front)
            self._stop(None)

    def _on_ready(self, front: Front) -> None:
        front.is_ready = True
        if all(other.is_ready for other in self._fronts):
            self._announce()

    def _on_submit(self, front: Front, request_id: int, started: float, prompts: list[tuple[int, Prompt]]) -> None:
        """Take the sequences of one request, all or none. Here alone the sequences of all fronts are counted."""
        count = len(self._active)
        if self.error is not None:
            self._send(front, ("answer", request_id, EngineDeadError(self.error)))
        elif count + len(prompts) > self._limit:
            text = f"{count} sequences are running or waiting, at most {self._limit} can"
            self._send(front, ("answer", request_id, QueueFullError(text)))
        else:
            for number, prompt in prompts:
                sequence = self._engine.add(prompt.tokens, prompt.max_new_tokens, prompt.sampling, prompt.stop_tokens)
                self._active[sequence] = front.generations[number] = Generation(number, front, started, sequence)
                self._prompt_tokens += len(prompt.tokens)
            self._send(front, ("answer", request_id, None))

    def _on_cancel(self, front: Front, number: int) -> None:
        if generation := front.generations.pop(number, None):
            front.unsent.pop(generation, None)
            front.urgent.pop(generation, None)
            if self._active.pop(generation.sequence, None):
                self._engine.scheduler.cancel(generation.sequence)

    def _on_metrics(self, front: Front, request_id: int) -> None:
        self._send(front, ("answer", request_id, self._snapshot()))

    def _snapshot(self) -> Snapshot:
        scheduler, stats = self._engine.scheduler, self._engine.stats
        allocator = scheduler.allocator
        values = {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "kv_cache_usage": 1 - allocator.num_free / allocator.num_pages,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            "preemptions": scheduler.num_evictions,
            "prefix_cache_queries": scheduler.prefix_queries,
            "prefix_cache_hits": scheduler.prefix_hits,
            "steps": stats.num_steps,
            "launches": stats.launches,
            "late_launches": stats.late_launches,
        }
        histograms = {"time_to_first_token_seconds": self._first, "inter_token_latency_seconds": self._between}
        return Snapshot(values, {name: (h.counts, h.total) for name, h in histograms.items()})

    def _publish(self, tokens: list[Token]) -> None:
        """Keep the tokens of one step, and send what is due, with one message per front."""
        now = time.perf_counter()
        intervals: dict[float, int] = {}  # how many tokens came so long after the one before; few values differ
        for sequence, token, logprob, top in tokens:
            generation = self._active[sequence]
            front = generation.front
            generation.tokens.append(token)
            if logprob is not None:
                generation.logprobs.append((logprob, top))
            if generation.last_token:
                seconds = now - generation.last_token
                intervals[seconds] = intervals.get(seconds, 0) + 1
            else:
                self._first.observe(now - generation.started)
                front.urgent[generation] = None
            generation.last_token = now
            front.unsent[generation] = None
            if sequence.is_done:
                del self._active[sequence]
                generation.is_done = True
                front.urgent[generation] = None
        self._generation_tokens += len(tokens)
        for seconds, count in intervals.items():
            self._between.observe(seconds, count)
        self._engine.scheduler.finished.clear()
        for front in self._fronts:
            self._deliver(front, now)

    def _deliver(self, front: Front, now: float) -> None:
        """Send what is due, unless the front is behind: then its tokens stay here and go out together."""
        if front.is_behind or not front.unsent:
            return
        if now >= front.next_delivery:
            front.next_delivery = now + DELIVERY_SECONDS * len(front.unsent)
            due, front.unsent = front.unsent, {}
        else:
            due = front.urgent
            for generation in due:
                del front.unsent[generation]
        front.urgent = {}
        if due:
            for generation in due:
                if generation.is_done:
                    del front.generations[generation.id]
            self._send(front, ("tokens", [generation.take() for generation in due]))
