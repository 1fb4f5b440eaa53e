"""bidikv's metrics on vLLM's own `/metrics`."""

import asyncio
import warnings
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bidikv_sdk.wire import OUTCOMES, CacheReport, Timings
from server_ext.core import metrics as names
from server_ext.core.metrics import Counts

with warnings.catch_warnings():
    # Warnings are errors, but what torch and vLLM say while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    import vllm.plugins
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_stock_metrics
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    from server_ext.http.metrics import EngineMetrics, TurnMetrics, attach, turn_metrics

from tests.core.fakes import FakePool, make_home


class FakeEngine:
    """An engine client whose control channel leads to a home; while `gate` is an unset event it is busy."""

    def __init__(self):
        self.home = make_home(FakePool(10))
        self.gate = None
        self.error = None
        self.num_calls = 0
        self.now_s = 0.0
        self.engine_core = SimpleNamespace(call_utility_async=self.call)

    async def call(self, method, op, arg):
        """Answer as `bidikv_control`."""
        assert method == "bidikv_control"
        self.num_calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.home.handle(op, arg, now_s=self.now_s)


@pytest.fixture
def engine():
    """Return an engine over a home with ten blocks."""
    return FakeEngine()


@pytest.fixture
def app(monkeypatch):
    """Return an app with vLLM's own routes for metrics, and ours in front, attached by vLLM's own plugin loader."""
    app = FastAPI()
    attach_stock_metrics(app)
    plugin = SimpleNamespace(attach_router=attach)
    monkeypatch.setattr(vllm.plugins, "load_endpoint_plugins", lambda tasks: [plugin])
    attach_endpoint_plugins(app, ("generate",))
    return app


async def get_metrics(app):
    """Return the response to a scrape."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d") as client:
        return await client.get("/metrics")


def parse(text):
    """Return {(sample name, label values): value} of a scrape."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def make_report(**changes):
    """Return the report of a turn that fetched its history."""
    fields = {
        "outcome": "fetched",
        "reason": "cheapest",
        "prompt_tokens": 100,
        "held_tokens": 90,
        "reused_tokens": 8,
        "fetched_tokens": 80,
        "computed_tokens": 12,
        "timings_s": Timings(ttft=0.3, prefill=0.2),
    }
    return CacheReport(**fields | changes)


# ---------------------------------------------------------------- the home's


def test_a_scrape_shows_the_home_beside_vllms_own_metrics(app, engine):
    """One scrape has vLLM's process metrics and every metric of the home, as text that Prometheus can read."""
    app.state.bidikv_metrics = EngineMetrics(engine)
    response = asyncio.run(get_metrics(app))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = parse(response.text)
    assert ("process_cpu_seconds_total",) in found or ("python_info", "CPython") in {key[:2] for key in found}
    assert found["bidikv_blocks", "free"] == 10
    assert found["bidikv_stale_reads_total",] == 0
    assert {key[0] for key in found} >= {metric.name for metric in names.HOME}
    families = [line.split()[2] for line in response.text.splitlines() if line.startswith("# TYPE bidikv_")]
    assert len(families) == len(set(families))


def test_every_scrape_asks_the_engine_anew(app, engine):
    """An idle engine's numbers are those of now, for it is asked each time."""
    app.state.bidikv_metrics = EngineMetrics(engine)

    async def scenario():
        await get_metrics(app)
        engine.home.handle("open", {"tenant": "t", "session_id": "s"}, now_s=0)
        return parse((await get_metrics(app)).text)

    assert asyncio.run(scenario())["bidikv_sessions", "idle"] == 1
    assert engine.num_calls == 2


def test_a_busy_engine_is_asked_once_and_its_last_numbers_are_served(app, engine):
    """Scrapes do not wait for a long step: they serve the last snapshot with its age, and queue no calls up."""
    now_s = 100.0
    app.state.bidikv_metrics = EngineMetrics(engine, timeout_s=0.001, clock=lambda: now_s)

    async def scenario():
        nonlocal now_s
        fresh = parse((await get_metrics(app)).text)
        engine.gate = asyncio.Event()
        now_s = 107.0
        for _ in range(3):
            stale = parse((await get_metrics(app)).text)
        assert engine.num_calls == 2
        engine.gate.set()
        late = parse((await get_metrics(app)).text)
        return [found["bidikv_snapshot_age_seconds",] for found in (fresh, stale, late)]

    assert asyncio.run(scenario()) == [0, 7, 0]


def test_an_engine_that_never_answered_leaves_vllms_metrics_alone(app, engine):
    """A dead engine fails no scrape."""
    engine.error = RuntimeError("the engine is dead")
    app.state.bidikv_metrics = EngineMetrics(engine)
    response = asyncio.run(get_metrics(app))
    assert response.status_code == 200
    assert "bidikv_blocks" not in response.text


def test_an_engine_without_a_home_leaves_vllms_metrics_alone(app, engine):
    """Where neither P nor D runs the route is vLLM's own; an engine that knows no such op is no error either."""
    assert "bidikv_blocks" not in asyncio.run(get_metrics(app)).text
    engine.home = SimpleNamespace(handle=lambda *_, **__: {"error": {"code": "engine_unavailable"}})
    app.state.bidikv_metrics = EngineMetrics(engine)
    assert "bidikv_blocks" not in asyncio.run(get_metrics(app)).text


def test_a_prefill_nodes_scrape_has_what_it_refused(app, engine):
    """On P the route adds what P counts, and no series of a home."""
    refused = {"metrics": Counts().snapshot(names.READER)}
    engine.home = SimpleNamespace(handle=lambda *_, **__: refused)
    app.state.bidikv_metrics = EngineMetrics(engine)
    text = asyncio.run(get_metrics(app)).text
    assert parse(text)["bidikv_tickets_refused_total", "forged"] == 0
    assert "bidikv_blocks" not in text


def test_without_vllms_route_nothing_is_attached():
    """There is nothing to add to where vLLM serves no metrics."""
    app = FastAPI()
    num_routes = len(app.routes)
    attach(app)
    assert len(app.routes) == num_routes


# ---------------------------------------------------------------- the turns'


def test_a_turn_is_counted_by_its_outcome():
    """Turns by outcome and reason, tokens by source, times by outcome."""
    registry = CollectorRegistry()
    turns = TurnMetrics(registry)
    turns.observe(make_report())
    turns.observe(make_report())
    turns.observe(make_report(outcome="local", reason="forced", timings_s=Timings()))
    found = parse(generate_latest(registry).decode())
    assert found["bidikv_turns_total", "fetched", "cheapest"] == 2
    assert found["bidikv_turns_total", "local", "forced"] == 1
    sources = {source: found["bidikv_prompt_tokens_total", source] for source in ("fetched", "reused", "computed")}
    assert sources == {"fetched": 240, "reused": 24, "computed": 36}
    assert found["bidikv_ttft_seconds_count", "fetched"] == 2
    assert found["bidikv_ttft_seconds_sum", "fetched"] == pytest.approx(0.6)
    assert found["bidikv_prefill_seconds_count", "local"] == 0


def test_all_series_of_known_labels_are_there_from_the_start():
    """Before the first turn the histograms of every outcome are there at zero."""
    registry = CollectorRegistry()
    TurnMetrics(registry)
    found = parse(generate_latest(registry).decode())
    assert [found["bidikv_ttft_seconds_count", outcome] for outcome in OUTCOMES] == [0] * len(OUTCOMES)


def test_the_process_counts_turns_where_vllm_serves_them(app):
    """The process's own turn metrics are on vLLM's route without ours, once."""
    assert turn_metrics() is turn_metrics()
    before = parse(asyncio.run(get_metrics(app)).text).get(("bidikv_turns_total", "prefilled", "first_turn"), 0)
    turn_metrics().observe(make_report(outcome="prefilled", reason="first_turn"))
    assert parse(asyncio.run(get_metrics(app)).text)["bidikv_turns_total", "prefilled", "first_turn"] == before + 1
