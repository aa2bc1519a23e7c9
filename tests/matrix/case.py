"""What the parts of the suite are made of."""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """A thing to try; it fails by raising."""

    group: str  # a column of the table
    name: str
    run: Callable[[], None]


class Skip(NamedTuple):
    """A group of cases that this runtime cannot have, and why; the table says it."""

    group: str
    reason: str


@contextlib.contextmanager
def raises(kind, *texts):
    """The block raises `kind`, and its message holds each of the texts."""
    try:
        yield
    except kind as error:
        message = str(error)
        for text in texts:
            assert text in message, f"{text!r} is not in {message!r}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def from_two_threads(first, second, times=5):
    """Run both functions at once, several times; what either raises is raised here."""
    barrier, errors = threading.Barrier(2, timeout=60), []

    def repeat(function):
        try:
            for _ in range(times):
                barrier.wait()
                function()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=repeat, args=(function,)) for function in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
