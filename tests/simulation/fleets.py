"""Builders for the simulator's tests: engines with round numbers, and sessions of a few turns."""

from dataclasses import replace

from server_ext.analysis.memory import make_settings
from server_ext.simulation.config import FleetConfig
from server_ext.simulation.fleet import Fleet
from server_ext.simulation.rates import FleetRates
from server_ext.traffic import PlannedSession, PlannedTurn

RATES = FleetRates(
    model="round",
    source="made up",
    kv_bytes_per_token=1_000,
    max_context_tokens=100_000,
    pool_tokens=50_000,
    step_tokens=1_000,
    prefill_step_tokens=1_000,
    control_s=0.01,
    prefill_fixed_s=0.1,
    prefill_least_s=0.0,
    prefill_s_per_token=0.001,
    attention_tokens=10_000.0,
    fetch_fixed_s=0.02,
    fetch_s_per_token=0.0001,
    handover_fixed_s=0.03,
    handover_s_per_token=0.0002,
    decode_step_s=0.05,
    decode_s_per_sequence=0.01,
    decode_s_per_context_token=0.0,
)


def turn(delta, output=10, *, gap=0.0, tool=False, kept=None):
    """Return one planned turn."""
    return PlannedTurn(gap, tool, delta, output, kept)


def session(*turns, start=0.0):
    """Return one planned session."""
    return PlannedSession(start, turns)


def config(*, budget=1.0, ttl=1000.0, rates=RATES, changes=None, **values):
    """Return a fleet of one P and one D whose prefill cache never hits, unless said otherwise."""
    defaults = {"num_prefill": 1, "num_decode": 1, "route": "fetch", "has_prefill_cache": False, "chunk_tokens": 10}
    return FleetConfig(
        **defaults | {"rates": replace(rates, **changes or {}), "settings": make_settings(budget, ttl)} | values
    )


def results(*sessions, **values):
    """Run sessions on a fleet."""
    return Fleet(config(**values)).run(iter(sessions)).results()
