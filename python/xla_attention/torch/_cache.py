"""Bounded caches of eager calls, which signal handlers may use at any moment."""

from typing import Any

CACHE_SIZE = 256


def put(cache: dict[tuple, Any], key: tuple, value: Any) -> None:  # noqa: ANN401
    """Store an entry as the most recently used one, and evict the least recently used ones."""
    cache[key] = value
    while len(cache) > CACHE_SIZE:
        # A call of a signal handler cannot interrupt `list(dict)`. It can interrupt an OrderedDict, which then crashes.
        cache.pop(list(cache)[0], None)  # noqa: RUF015
