"""bidikv's metrics on vLLM's own `/metrics`.

Two sources. What turns did is counted here, by the API process that conducted them (`turn_metrics().observe`), with
the library that vLLM counts with: so vLLM's own route serves it.
What the home holds, and what a prefill node refused, lies in the engine core: `attach` puts a route in front of vLLM's
that asks the engine at each scrape and adds its answer, so that it is true on an idle engine as well; where the engine
is busy, the last answer is served, with its age.

Order: `attach` once on the app (with the routes), `EngineMetrics` as `app.state.bidikv_metrics` once the engine is
there.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from server_ext.core import metrics as names
from server_ext.engine import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI

    from bidikv_sdk.wire import CacheReport
    from server_ext.core.metrics import Metric, Snapshot

logger = compat.init_logger("vllm.bidikv")
_PATH = "/metrics"
# Well below the 10 s that Prometheus waits by default, well above an idle engine's few milliseconds.
_SCRAPE_TIMEOUT_S = 1.0
_FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class TurnMetrics:
    """What the turns of this process did.

    Args:
        registry: where the metrics are registered; the default is the one that vLLM serves.

    Raises:
        ValueError: the registry has them already; see `turn_metrics`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._turns = _counter(names.TURNS_ENDED, registry)
        self._tokens = _counter(names.PROMPT_TOKENS, registry)
        self._ttft = _histogram(names.TTFT, registry)
        self._prefill = _histogram(names.PREFILL, registry)

    def observe(self, cache: CacheReport) -> None:
        """Count a turn that was answered."""
        self._turns.labels(cache.outcome, cache.reason).inc()
        self._tokens.labels("fetched").inc(cache.fetched_tokens)
        self._tokens.labels("reused").inc(cache.reused_tokens)
        self._tokens.labels("computed").inc(cache.computed_tokens)
        if cache.timings_s.ttft is not None:
            self._ttft.labels(cache.outcome).observe(cache.timings_s.ttft)
        if cache.timings_s.prefill is not None:
            self._prefill.labels(cache.outcome).observe(cache.timings_s.prefill)


@functools.cache
def turn_metrics() -> TurnMetrics:
    """Return this process's own; a registry takes each name once."""
    return TurnMetrics()


class EngineMetrics:
    """The metrics of a home or of a prefill node's reads, asked for at each scrape, with a deadline.

    Args:
        engine_client: vLLM's.
        timeout_s: how long a scrape waits for the engine, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self, engine_client: Any, *, timeout_s: float = _SCRAPE_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine_client = engine_client
        self._timeout_s = timeout_s
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._taken_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def scrape(self) -> bytes:
        """Return the engine's metrics in Prometheus' text format: as they are now, else as they were last.

        Empty where the engine never answered. Never raises for an engine that is busy, draining or dead.
        """
        # A busy engine is asked once, however many scrapes wait for it.
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        await asyncio.wait([self._asking], timeout=self._timeout_s)
        if self._snapshot is None:
            return b""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self._snapshot, age_s=self._clock() - self._taken_s))
        return generate_latest(registry)

    async def _ask(self) -> None:
        try:
            reply = await compat.call_control(self._engine_client, "metrics", {})
        except Exception as error:  # noqa: BLE001 - a scrape must not fail with the engine; vLLM reports that itself
            logger.debug("No metrics from the engine: %s", error)
        else:
            if "metrics" in reply:
                self._snapshot, self._taken_s = reply["metrics"], self._clock()
        finally:
            self._asking = None


def attach(app: FastAPI) -> None:
    """Put the route in front of vLLM's `/metrics`.

    Called from an endpoint plugin's `attach_router`: vLLM lets a plugin's route replace one of the same path. Without
    such a route, which no supported vLLM lacks, nothing is attached, and a warning says so.
    """
    stock = next((route for route in app.routes if isinstance(route, APIRoute) and route.path == _PATH), None)
    if stock is None:
        logger.warning("No route %s to add bidikv's metrics to; they are not served.", _PATH)
        return

    async def metrics(request: Request) -> Response:
        """Serve vLLM's metrics and bidikv's."""
        response: Response = await run_in_threadpool(stock.endpoint, request)
        engine: EngineMetrics | None = getattr(request.app.state, "bidikv_metrics", None)
        if engine is None:
            return response
        body = bytes(response.body) + await engine.scrape()
        return Response(body, media_type=response.headers["content-type"])

    app.add_api_route(_PATH, metrics, methods=["GET"], response_class=stock.response_class)


class _Families(Collector):
    """A snapshot as the library's own objects."""

    def __init__(self, snapshot: Snapshot, *, age_s: float) -> None:
        self._snapshot: Snapshot = {**snapshot, names.SNAPSHOT_AGE.name: [([], age_s)]}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric that the snapshot has and this version knows."""
        for metric in (*names.HOME, *names.READER, names.SNAPSHOT_AGE):
            if metric.name in self._snapshot:
                family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
                for labels, value in self._snapshot[metric.name]:
                    family.add_metric(labels, value)
                yield family


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    counter = Counter(metric.name, metric.help, metric.labels, registry=registry)
    for known in metric.known:
        counter.labels(*known)
    return counter


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    histogram = Histogram(metric.name, metric.help, metric.labels, buckets=names.SECONDS, registry=registry)
    for known in metric.known:
        histogram.labels(*known)
    return histogram
