"""Starts the front processes beside the engine, and ends all of them together."""

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama.engine import Engine

    from .messages import FrontSettings

# How long a front process may take to end after its connection to the engine was closed.
EXIT_SECONDS = 5
EXAMPLES = Path(__file__).resolve().parents[1]


class FrontLostError(RuntimeError):
    """A front process has ended without being told to."""


@dataclass
class FrontProcess:
    """A front process and our end of the socket to it."""

    process: subprocess.Popen
    connection: socket.socket


def default_count() -> int:
    """How many front processes this machine gets: one for four cores, from 1 to 8."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), 8)


@contextmanager
def front_processes(count: int, listener: socket.socket) -> Iterator[list[FrontProcess]]:
    """Start `count` processes that accept on `listener`, which is closed here; they end when the context does.

    Each waits for `FrontSettings`. They also end if this process is killed, because their sockets then close.
    """
    fronts = []
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            numbers = listener.fileno(), theirs.fileno()
            command = [sys.executable, "-m", "serve.front", *map(str, numbers)]
            fronts.append(FrontProcess(subprocess.Popen(command, pass_fds=numbers, env=environment), ours))
            theirs.close()
        listener.close()
        yield fronts
    finally:
        for front in fronts:
            front.connection.close()
        for front in fronts:
            try:
                front.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                front.process.kill()
                front.process.wait()


@contextmanager
def caught_signals() -> Iterator[socket.socket]:
    """A socket from which the numbers of SIGINT and SIGTERM are read, instead of what they do otherwise."""
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        descriptor = signal.set_wakeup_fd(writing.fileno())
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    engine: "Engine",
    settings: "FrontSettings",
    fronts: list[FrontProcess],
    max_waiting: int,
    address: tuple[str, int],
) -> int | None:
    """Serve until SIGTERM or SIGINT, whose number is returned; `FrontLostError` if a front process ends before."""
    # A collection need not look at what is here to stay.
    gc.collect()
    gc.freeze()
    # Imported here, because the engine's module selects the platform.
    from .messages import encode
    from .service import Service

    def announce() -> None:
        url = f"http://{address[0]}:{address[1]}"
        body = f'{{"model": "{settings.model}", "prompt": "The sky is", "max_tokens": 16}}'
        print(f"serving {settings.model} at {url}, which is a page to chat with", flush=True)
        print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)

    for front in fronts:
        front.connection.sendall(encode(settings))
    service = Service(engine, [f.connection for f in fronts], max_waiting, settings.drain_seconds, announce)
    with caught_signals() as signals:
        service.run(signals)
    if service.lost_front is not None:
        lost = fronts[service.lost_front].process
        raise FrontLostError(f"front process {lost.pid} has ended with exit code {lost.wait(EXIT_SECONDS)}")
    return service.signal


def end_by(number: int) -> None:
    """End this process by a signal that it has caught before."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
