"""What /metrics tells, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llama.scheduler import Scheduler

PREFIX = "xla_attention_"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Gauges of the scheduler, counters and histograms of the tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: type, name: str, text: str, **options: object) -> Counter | Gauge | Histogram:
            return kind(PREFIX + name, text, registry=self.registry, **options)

        self.running = make(Gauge, "requests_running", "Sequences in the batch")
        self.waiting = make(Gauge, "requests_waiting", "Sequences that wait for a place")
        self.cache_use = make(Gauge, "kv_cache_usage", "Share of the cache's pages in use, 0 to 1")
        self.tokens = make(Counter, "generation_tokens", "Generated tokens")
        # Of the scheduler, which counts them itself.
        self.totals = {
            "num_evictions": make(Counter, "preemptions", "Sequences whose pages were taken; they are recomputed"),
            "prefix_queries": make(Counter, "prefix_cache_queries", "Tokens looked up in the prefix cache"),
            "prefix_hits": make(Counter, "prefix_cache_hits", "Tokens that the prefix cache had"),
        }
        self.counted = dict.fromkeys(self.totals, 0)
        self.first = make(Histogram, "time_to_first_token_seconds", "Arrival to first token", buckets=SECONDS)
        self.between = make(Histogram, "inter_token_latency_seconds", "One token to the next", buckets=SECONDS)

    def token(self, seconds: float, *, first: bool) -> None:
        """Count one generated token, `seconds` after the one before it or after the request."""
        self.tokens.inc()
        (self.first if first else self.between).observe(seconds)

    def observe(self, scheduler: Scheduler) -> None:
        """Take over the state of the scheduler."""
        allocator = scheduler.allocator
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.cache_use.set(1 - allocator.num_free / allocator.num_pages)

        for name, counter in self.totals.items():
            total = getattr(scheduler, name)
            counter.inc(total - self.counted[name])
            self.counted[name] = total

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
