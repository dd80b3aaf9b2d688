"""`GET /metrics`, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sparring.backend.gateway.recorder import Recorder

__all__ = ["GatewayMetrics"]


class GatewayMetrics:
    """Requests by route and status, and the recorder's own sums."""

    def __init__(self, recorder: Recorder) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RecorderCollector(recorder))
        self.requests = Counter(
            "sparring_gateway_requests", "Requests.", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "sparring_gateway_request_seconds",
            "Time to the answer, or to the first event of a stream.",
            ("route",),
            registry=self._registry,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # rendered outside a loop, or registered before there is one
        return 0


class _RecorderCollector(Collector):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        recorder, totals = self._recorder, self._recorder.totals
        yield GaugeMetricFamily("sparring_sessions_open", "Sessions open now.", len(recorder.sessions))
        yield CounterMetricFamily("sparring_sessions", "Sessions opened.", totals.sessions)
        yield GaugeMetricFamily("sparring_tasks", "Tasks of the event loop, which a leak would show.", _tasks())
        yield CounterMetricFamily("sparring_turns", "Model calls recorded.", totals.usage.turns)
        yield CounterMetricFamily("sparring_prompt_tokens", "Prompt tokens.", totals.usage.prompt_tokens)
        yield CounterMetricFamily("sparring_sampled_tokens", "Sampled tokens.", totals.usage.completion_tokens)
        breaks = CounterMetricFamily("sparring_sequence_breaks", "Why a sequence had to start.", labels=("reason",))
        for reason, count in totals.breaks.items():
            breaks.add_metric((reason,), count)
        yield breaks
        normalised = CounterMetricFamily(
            "sparring_normalised_settings", "Client settings replaced by the run's.", labels=("setting",)
        )
        for name, count in totals.normalised.items():
            normalised.add_metric((name,), count)
        yield normalised
