"""What /metrics shows. Every sample carries the served model's name.

What happens here is counted when it happens; what the engine counts is read from its latest `Stats`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tpserve.messages import STEP_PARTS, Stats, Tokens

_WAITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LATENCIES_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300, 600, 1200)
_STEP_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample per counter, of use to nobody here


class Metrics:
    """The registry and what is counted into it. Choices are counted one by one: a request with n = 3 ends three times."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._engine = EngineCollector(model)
        self.registry.register(self._engine)

        def histogram(name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tpserve_{name}", help_, ["model_name"], registry=self.registry, buckets=buckets).labels(model)

        def counter(name: str, help_: str) -> Counter:
            return Counter(f"tpserve_{name}", help_, ["model_name"], registry=self.registry).labels(model)

        self._wait = histogram("request_wait_seconds", "From a choice's submission to its first step.", _WAITS_S)
        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to a choice's first token.", _WAITS_S)
        self._per_token = histogram("time_per_output_token_seconds", "Mean of a choice's tokens after the first.", _PER_TOKEN_S)
        self._latency = histogram("request_latency_seconds", "From a request's arrival to a choice's end.", _LATENCIES_S)
        self._prompt = counter("prompt_tokens", "Tokens of prompts whose first answer token has come.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        labels = ["model_name", "finish_reason"]
        ends = Counter("tpserve_requests", "Choices that ended, by reason.", labels, registry=self.registry)
        self._ends = {reason: ends.labels(model, reason) for reason in ("stop", "length", "abort", "error")}
        labels = ["model_name", "part"]
        parts = Histogram(
            "tpserve_step_seconds",
            "Rank 0's time in steps; `wait` is for its other threads and the other ranks.",
            labels,
            registry=self.registry,
            buckets=_STEP_S,
        )
        self._parts = [parts.labels(model, part) for part in STEP_PARTS]

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        """A choice got its first token, so long after its request arrived."""
        self._first.observe(seconds)

    def prompt_done(self, tokens: int) -> None:
        """A prompt of so many tokens has been worked through."""
        self._prompt.inc(tokens)

    def ended(self, reason: str, seconds: float, token_seconds: float | None) -> None:
        """A choice ended: its latency, and its mean time per token after the first if it had more than one."""
        self._ends[reason].inc()
        self._latency.observe(seconds)
        if token_seconds is not None:
            self._per_token.observe(token_seconds)

    def step(self, tokens: Tokens, generated: int) -> None:
        """A step's results came, with so many tokens for open choices."""
        self._generated.inc(generated)
        for part, seconds in zip(self._parts, tokens.seconds.tolist()):
            part.observe(seconds)
        for seconds in tokens.waits.tolist():
            self._wait.observe(seconds)

    def engine(self, stats: Stats) -> None:
        """The engine's latest counts."""
        self._engine.stats = stats


class EngineCollector:
    """Shows the latest `Stats`."""

    def __init__(self, model: str):
        self._model = model
        self.stats = Stats()

    def collect(self) -> Iterator[Metric]:
        """One family per figure; prometheus_client calls this."""
        stats = self.stats
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("requests_running", "Choices that are in the running batch.", stats.running)
        yield self._gauge("requests_waiting", "Choices that wait for a place in it.", stats.waiting)
        yield self._gauge("kv_pages_used", "KV pages that choices hold.", stats.pages_used)
        yield self._gauge("kv_pages_total", "KV pages of each rank's pool.", stats.pages_total)
        yield self._gauge(
            "kv_tokens",
            "Tokens in the KV pages that choices hold, shared ones once.",
            stats.kv_tokens,
        )
        yield self._gauge("kv_cache_usage_ratio", "Share of the KV pages that is held.", usage)
        hits = {"": stats.prefix_hit_tokens}
        yield self._counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", hits)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", {"": stats.drafted})
        yield self._counter("spec_decode_num_accepted_tokens", "Of these, those that were right.", {"": stats.accepted})
        yield self._counter("preemptions", "Choices that lost their pages to others.", {"": stats.preemptions})
        yield self._counter("plan_bytes", "Bytes of step plans, each plan once.", {"": stats.plan_bytes})
        kinds = {"all_reduce": stats.all_reduces, "all_gather": stats.all_gathers}
        yield self._counter("collectives", "Collective operations, each once for all ranks.", kinds, "kind")

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tpserve_{name}", help_, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help_: str, values: dict[str, int], label: str | None = None) -> Metric:
        family = CounterMetricFamily(f"tpserve_{name}", help_, labels=["model_name", *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([self._model, *([key] if label else [])], value)
        return family
