"""A front process: HTTP, JSON, tokenising and text, for the engine in the process that started it. Imports no JAX.

python -m serve.front LISTENER CHANNEL

Both are numbers of inherited sockets: one on which to accept connections, and the one to the engine's process.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from .app import Server
from .client import EngineClient
from .messages import FrontSettings, receive_first

# Connections that the system keeps until a front accepts them.
BACKLOG = 2048
# For clients to read that the engine's process has ended.
LAST_SECONDS = 1


class FrontServer(uvicorn.Server):
    """uvicorn, started and stopped by the engine's process."""

    def __init__(self, settings: FrontSettings, channel: socket.socket) -> None:
        self._channel = channel
        self._client = EngineClient(self.stop)
        # Fronts share the listener. One that took as many connections as wait would leave none to the others.
        config = uvicorn.Config(
            Server(self._client, settings).app(),
            backlog=1,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=settings.drain_seconds,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals ignored: the engine's process gets them too, and says when to end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engine, then accept."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._client, sock=self._channel)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn has set the system's queue, too, to what it accepts at once
        self._client.ready()

    def stop(self, lost: bool) -> None:
        """End after the open answers; soon if the engine's process is `lost`."""
        if lost:
            self.config.timeout_graceful_shutdown = LAST_SECONDS
        self.should_exit = True


def main() -> None:
    """Serve until the engine's process says to end, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    listener, channel = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    settings = receive_first(channel)
    if settings is None:
        return
    # What is here stays: no collection needs to look at it.
    gc.collect()
    gc.freeze()
    FrontServer(settings, channel).run([listener])


if __name__ == "__main__":
    main()
