"""What the engine's process and a front process send each other over a socket: a length, then a pickled tuple.

A message begins with its kind. Fronts send

    ("ready",)
    ("submit", request_id, time of arrival, [(id, `Prompt`), ...])
    ("cancel", id)
    ("metrics", request_id)

and the engine's process sends `FrontSettings` as the first message, and then

    ("answer", request_id, value)             None to "submit", an exception if it is refused
    ("tokens", [Delivery, ...])           of one step or of several
    ("fail", text)                        the engine has ended
    ("stop",)                             end after the open answers
"""

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from llama.options import Sampling
from llama.tokenizer import ChatTokenizer

HEAD = struct.Struct("<I")

# Of one token: its log-probability, and the most likely tokens with theirs, most likely first.
Logprobs = tuple[float, tuple[tuple[int, float], ...]]
# Id of a generation, its new tokens, their log-probabilities (None if not asked for), whether they are the last.
Delivery = tuple[int, list[int], list[Logprobs] | None, bool]


class QueueFullError(RuntimeError):
    """As many sequences as the server holds are running or waiting."""


class EngineDeadError(RuntimeError):
    """The engine has ended with an exception, or its process has ended."""


@dataclass(frozen=True)
class Prompt:
    """What one sequence continues, and how."""

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]


@dataclass(frozen=True)
class FrontSettings:
    """What a front process needs to know.

    Attributes
    ----------
        capacity: the largest number of tokens of a prompt and what is generated for it.
    """

    model: str
    tokenizer: ChatTokenizer
    capacity: int
    api_key: str | None
    drain_seconds: int


def encode(message: object) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, 5)
    return HEAD.pack(len(body)) + body


class Decoder:
    """Messages from bytes as they arrive; both ends are this program, so that they can be unpickled."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple]:
        """The messages that are complete with `data`."""
        self._data += data
        at = 0
        while len(self._data) >= at + HEAD.size:
            end = at + HEAD.size + HEAD.unpack_from(self._data, at)[0]
            if len(self._data) < end:
                break
            yield pickle.loads(self._data[at + HEAD.size : end])
            at = end
        del self._data[:at]


def receive_first(connection: socket.socket) -> FrontSettings | None:
    """Wait for the first message, and read no further; None if the engine's process ends before."""
    with connection.makefile("rb", buffering=0) as stream:
        head = stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        body = bytearray()
        (size,) = HEAD.unpack(head)
        while len(body) < size and (part := stream.read(size - len(body))):
            body += part
        return pickle.loads(body) if len(body) == size else None
