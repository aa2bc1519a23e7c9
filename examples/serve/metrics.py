"""What /metrics tells: the engine's process counts, and whichever front process is asked writes Prometheus' text."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "xla_attention_"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
GAUGES = {
    "requests_running": "Sequences in the batch",
    "requests_waiting": "Sequences that wait for a place",
    "kv_cache_usage": "Share of the cache's pages in use, 0 to 1",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "generation_tokens": "Generated tokens",
    "preemptions": "Sequences whose pages were taken; they are recomputed",
    "prefix_cache_queries": "Tokens looked up in the prefix cache",
    "prefix_cache_hits": "Tokens that the prefix cache had",
    "steps": "Steps of the engine",
    "launches": "Launches of the engine, each of one step or several",
    "late_launches": "Launches before which the device waited for the host",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token",
    "inter_token_latency_seconds": "One token to the next",
}


class Snapshot(NamedTuple):
    """All values at one time, by their names; of histograms the counts of the buckets, and the sum."""

    values: dict[str, float]
    histograms: dict[str, tuple[list[int], float]]


class Latencies:
    """A histogram that takes many equal values at once, as the sequences of a step have them.

    Attributes
    ----------
        counts: values up to each of `SECONDS` and above the one before it, then those above all.
        total: the sum of the values.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `seconds` `count` times."""
        self.counts[bisect_left(SECONDS, seconds)] += count
        self.total += seconds * count


class _Page:
    """The collector of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        values, histograms = self._snapshot
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, values[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, values[name])
        bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
        for name, text in HISTOGRAMS.items():
            counts, total = histograms[name]
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            yield HistogramMetricFamily(PREFIX + name, text, buckets, total)


def page(snapshot: Snapshot) -> bytes:
    """Prometheus' text."""
    registry = CollectorRegistry()
    registry.register(_Page(snapshot))
    return generate_latest(registry)
