"""What /metrics tells, in Prometheus' text format."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily

from llama.engine import Engine

PREFIX = "xla_attention_"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Latencies:
    """A histogram that takes many equal values at once, as the sequences of a step have them."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `seconds` `count` times."""
        self._counts[bisect_left(SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What the registry asks for."""
        bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Metrics:
    """Gauges of the scheduler, counters and histograms of the tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: type, name: str, text: str) -> Counter | Gauge:
            return kind(PREFIX + name, text, registry=self.registry)

        self.running = make(Gauge, "requests_running", "Sequences in the batch")
        self.waiting = make(Gauge, "requests_waiting", "Sequences that wait for a place")
        self.cache_use = make(Gauge, "kv_cache_usage", "Share of the cache's pages in use, 0 to 1")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Tokens of prompts")
        self.tokens = make(Counter, "generation_tokens", "Generated tokens")
        # Of the scheduler and the engine's statistics, which count them themselves.
        self.totals = {
            "num_evictions": make(Counter, "preemptions", "Sequences whose pages were taken; they are recomputed"),
            "prefix_queries": make(Counter, "prefix_cache_queries", "Tokens looked up in the prefix cache"),
            "prefix_hits": make(Counter, "prefix_cache_hits", "Tokens that the prefix cache had"),
        }
        self.totals["num_steps"] = make(Counter, "steps", "Steps of the engine")
        self.totals["late_steps"] = make(Counter, "late_steps", "Steps before which the device waited for the host")
        self.counted = dict.fromkeys(self.totals, 0)
        self.first = Latencies(PREFIX + "time_to_first_token_seconds", "Arrival to first token")
        self.between = Latencies(PREFIX + "inter_token_latency_seconds", "One token to the next")
        self.registry.register(self.first)
        self.registry.register(self.between)

    def observe(self, engine: Engine) -> None:
        """Take over the state of the engine."""
        scheduler, stats = engine.scheduler, engine.stats
        allocator = scheduler.allocator
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.cache_use.set(1 - allocator.num_free / allocator.num_pages)

        for name, counter in self.totals.items():
            total = getattr(stats if name.endswith("steps") else scheduler, name)
            counter.inc(total - self.counted[name])
            self.counted[name] = total

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
