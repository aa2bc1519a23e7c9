"""The engine as a front process sees it: requests go out, tokens come in, on the event loop."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .messages import Decoder, Delivery, EngineDeadError, Logprobs, Prompt, encode
from .metrics import Snapshot


@dataclass(eq=False)
class Generation:
    """One sequence.

    Attributes
    ----------
        index: its place among the choices of its request.
        tokens: those that arrived and were not taken, `logprobs` of each of them if the prompt asks for them.
        is_done: whether no more tokens come.
        num_taken: tokens that the text is made of.
    """

    id: int
    index: int
    prompt: Prompt
    group: "Group"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    is_done: bool = False
    num_taken: int = 0


class Group:
    """The sequences of one request."""

    def __init__(self, prompts: list[Prompt], numbers: Iterator[int]) -> None:
        self.generations = [Generation(next(numbers), i, prompt, self) for i, prompt in enumerate(prompts)]
        self._changed: dict[Generation, None] = {}
        self._arrived = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._is_left = False

    def notify(self, generation: Generation) -> None:
        """Something has arrived for a generation."""
        self._changed[generation] = None
        self._arrived.set()

    def fail(self, error: EngineDeadError) -> None:
        """No more tokens come, because the engine has ended."""
        self._error = error
        self._arrived.set()

    def leave(self) -> None:
        """The client has left: `changes` ends."""
        self._is_left = True
        self._arrived.set()

    async def changes(self) -> AsyncIterator[dict[Generation, None]]:
        """The generations for which something has arrived, each time there are some; `EngineDeadError` from `fail`."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._error is not None:
                raise self._error
            if self._is_left:
                return
            changed, self._changed = self._changed, {}
            yield changed


class EngineClient(asyncio.Protocol):
    """The front's end of the socket.

    Attributes
    ----------
        error: why the engine has ended, or None.
    """

    def __init__(self, on_stop: Callable[[bool], None]) -> None:
        """`on_stop(lost)` is called when this process is to end; `lost` if the engine's process has ended."""
        self.error: str | None = None
        self._on_stop = on_stop
        self._decoder = Decoder()
        self._numbers = itertools.count()
        self._generations: dict[int, Generation] = {}
        self._answers: dict[int, asyncio.Future] = {}
        self._handlers = {"tokens": self._tokens, "answer": self._answer, "fail": self._fail, "stop": self._stop}

    def connection_made(self, transport: Any) -> None:
        """The socket is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Messages, or parts of them; all that came while this process was busy is handed out at once."""
        for kind, *values in self._decoder.feed(data):
            self._handlers[kind](*values)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's process has ended."""
        self._fail("the engine's process has ended")
        self._on_stop(True)

    def ready(self) -> None:
        """Say that this process accepts connections."""
        self._transport.write(encode(("ready",)))

    async def submit(self, prompts: list[Prompt]) -> Group:
        """Queue the sequences of one request, all or none; `QueueFullError` or `EngineDeadError`."""
        group = Group(prompts, self._numbers)
        self._generations |= {generation.id: generation for generation in group.generations}
        requests = [(generation.id, generation.prompt) for generation in group.generations]
        try:
            # The clock is the same in all processes.
            await self._ask("submit", time.perf_counter(), requests)
        except BaseException:
            self.close(group)
            raise
        return group

    async def metrics(self) -> Snapshot:
        """What the engine's process has counted."""
        return await self._ask("metrics")

    def close(self, group: Group) -> None:
        """Forget a request, and cancel what has not ended of it."""
        for generation in group.generations:
            self.end(generation)

    def end(self, generation: Generation) -> None:
        """Forget one sequence, and cancel it if it has not ended."""
        if self._generations.pop(generation.id, None) and not generation.is_done and not self._transport.is_closing():
            self._transport.write(encode(("cancel", generation.id)))

    async def _ask(self, kind: str, *values: Any) -> Any:
        if self._transport.is_closing():
            raise EngineDeadError(self.error)
        request_id = next(self._numbers)
        self._answers[request_id] = asyncio.get_running_loop().create_future()
        self._transport.write(encode((kind, request_id, *values)))
        try:
            return await self._answers[request_id]
        finally:
            self._answers.pop(request_id, None)

    def _answer(self, request_id: int, value: Any) -> None:
        future = self._answers.get(request_id)
        if future is None or future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _tokens(self, deliveries: list[Delivery]) -> None:
        for number, tokens, logprobs, is_done in deliveries:
            generation = self._generations.get(number)
            if generation is not None:  # otherwise it was cancelled meanwhile
                generation.tokens += tokens
                generation.logprobs += logprobs or ()
                generation.is_done = is_done
                generation.group.notify(generation)

    def _fail(self, text: str) -> None:
        self.error = text
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDeadError(text))
        for group in {generation.group for generation in self._generations.values()}:
            group.fail(EngineDeadError(text))

    def _stop(self) -> None:
        self._on_stop(False)
