"""Cases of the suite, and helpers for them."""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """One test; it fails by raising an exception."""

    group: str  # a column of the table
    name: str
    run: Callable[[], None]


class Skip(NamedTuple):
    """A group without cases in this runtime; the reason goes into the table."""

    group: str
    reason: str


@contextlib.contextmanager
def raises(kind, *texts):
    """Assert that the block raises `kind` with a message that contains each text."""
    try:
        yield
    except kind as error:
        message = str(error)
        for text in texts:
            assert text in message, f"{text!r} is not in {message!r}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def run_at_once(*functions, times=5):
    """Run each function in its own thread, all of them in parallel, several times; an exception is raised here."""
    barrier, errors = threading.Barrier(len(functions), timeout=60), []

    def repeat(function):
        try:
            for _ in range(times):
                barrier.wait()
                function()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=repeat, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
