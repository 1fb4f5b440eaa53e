"""What `make bench` runs: scenarios, the engines of each, and how often. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from bench._setups import AGGREGATED, HOLD_S, Setup
from server_ext.benchmark.arms import ROUTES
from server_ext.benchmark.scenarios import Scenario, growing, stepping
from server_ext.launch.model import SMOLLM2
from server_ext.launch.tiny import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server_ext.traffic import PlannedSession

    Plan: TypeAlias = Callable[[int], Iterable[PlannedSession]]

ARMS: Final = (*ROUTES, *HOLD_S, AGGREGATED)
"""The first one is what all are compared with."""
_DELTA: Final = (64, 128)
_MAX_DELTA: Final = 200  # an agent's short turns stay below, and what brings it to the next length is above
_ANSWER: Final = 16
_TINY_ANSWER: Final = 4
_TINY_ROUNDS: Final = 10  # of few agents each: the oftener arms alternate, the less a 95th percentile is the weather's

# P under pressure: others' prompts, between any two turns, are as long as what P has room for.
_PRESSED_LEN: Final = 1_536
_PRESSED_TINY_LEN: Final = 768


@dataclass(frozen=True, kw_only=True)
class Part:
    """One scenario of a run."""

    scenario: Scenario
    setup: Setup
    rounds: int
    max_minutes: float | None = None
    """No other round begins behind it: where computing is slow, a run shows less, and takes no longer."""


REAL: Final = Setup(name="real", model=SMOLLM2)
REAL_PRESSED: Final = Setup(name="real_pressed", model=SMOLLM2, prefill_tokens=_PRESSED_LEN, max_model_len=_PRESSED_LEN)
REAL_SLOW: Final = Setup(name="real_slow", model=SMOLLM2, link_tokens_per_s=90.0)
TINY_FAST: Final = Setup(name="tiny", model=TINY)
TINY_PRESSED: Final = Setup(
    name="tiny_pressed", model=TINY, prefill_tokens=_PRESSED_TINY_LEN, max_model_len=_PRESSED_TINY_LEN
)
TINY_SLOW: Final = Setup(name="tiny_slow", model=TINY, link_tokens_per_s=8_000.0)

LONG_AGENT: Final = Scenario(
    name="long_agent",
    what="One agent at a time, brought to 2,000 and then to 3,000 tokens: at each length turns of 64 to 128 new "
    "tokens, 16 generated; the last two beside two requests that decode all the time.",
    plan=stepping((2_000, 3_000), turns_at_each=(2, 4), delta_tokens=_DELTA, output_tokens=_ANSWER),
    arms=ARMS,
    max_delta=_MAX_DELTA,
    turns_beside=range(7, 9),
    num_beside=2,
    points=(2_000, 3_000),
)
LONGEST_AGENT: Final = replace(
    LONG_AGENT,
    name="longest_agent",
    what="One agent at a time with 6,000 tokens: turns of 64 to 128 new tokens, 16 generated.",
    plan=stepping((6_000,), turns_at_each=(3,), delta_tokens=_DELTA, output_tokens=_ANSWER),
    turns_beside=(),
    num_beside=0,
    points=(6_000,),
)
AGENT: Final = replace(
    LONG_AGENT,
    what="One agent at a time of 1,200 tokens: turns of 64 to 128 new tokens, 16 generated; the last two beside two "
    "requests that decode all the time.",
    plan=stepping((1_200,), turns_at_each=(4,), delta_tokens=_DELTA, output_tokens=_ANSWER),
    turns_beside=range(4, 6),
    points=(),
)
LONG_AGENT_TAIL: Final = Scenario(
    name="long_agent_tail",
    what="The same agent near 2,000 tokens only, 4 generated, with turns enough for a 99th percentile.",
    plan=growing((1_700,) * 3, num_turns=10, delta_tokens=_DELTA, output_tokens=_TINY_ANSWER),
    arms=("no_reuse", "fetch"),
    points=(2_000,),
)
SHORT_CHAT: Final = Scenario(
    name="short_chat",
    what="One chat at a time: a first prompt of 150 tokens, 30 to 60 new tokens a turn, 16 generated; the last two of "
    "its five turns beside two requests that decode all the time.",
    plan=growing((150,), num_turns=5, delta_tokens=(30, 60), output_tokens=_ANSWER),
    arms=ARMS,
    turns_beside=range(4, 6),
    num_beside=2,
)
PRESSED: Final = Scenario(
    name="prefill_pressure",
    what="One agent at a time of 900 to 1,300 tokens, 64 to 96 new ones a turn, 16 generated. P has room for "
    f"{_PRESSED_LEN:,} tokens, and computes three prompts of 500 tokens of other sessions between any two turns. No "
    "cache is emptied.",
    plan=growing((900,), num_turns=4, delta_tokens=(64, 96), output_tokens=_ANSWER),
    arms=ARMS,
    num_crowd=3,
    crowd_tokens=500,
)
SLOW_LINK: Final = Scenario(
    name="slow_link",
    what="The same agent, P undisturbed, on a link that moves 90 tokens' KV (4 MB) a second: fetching a history "
    "takes longer than computing it.",
    plan=growing((900,), num_turns=4, delta_tokens=(64, 96), output_tokens=_ANSWER),
    arms=ARMS,
)


def _tiny(scenario: Scenario, what: str, plan: Plan) -> Scenario:
    """Return a scenario with many short turns of the tiny model, for quantiles; nothing decodes beside them."""
    return replace(
        scenario,
        name=f"{scenario.name}_tiny",
        what=f"{what}, {_TINY_ANSWER} generated; a tiny random model, with which a turn costs little but what is not "
        "computing.",
        plan=plan,
        points=(),
        max_delta=None,
        turns_beside=(),
        num_beside=0,
    )


def _many(first: int, num_agents: int, num_turns: int, delta: tuple[int, int]) -> Plan:
    return growing((first,) * num_agents, num_turns=num_turns, delta_tokens=delta, output_tokens=_TINY_ANSWER)


LONG_AGENT_TINY: Final = _tiny(
    LONG_AGENT,
    "One agent at a time of 1,500 to 2,600 tokens, 64 to 128 new ones a turn",
    _many(1_500, 5, 11, _DELTA),
)
SHORT_CHAT_TINY: Final = _tiny(
    SHORT_CHAT, "One chat at a time of 150 to 700 tokens, 30 to 60 new ones a turn", _many(150, 5, 11, (30, 60))
)
PRESSED_TINY: Final = replace(
    _tiny(
        PRESSED,
        "One agent at a time of 400 to 650 tokens, 20 to 40 new ones a turn; P has room for "
        f"{_PRESSED_TINY_LEN} tokens, and computes a prompt of 700 tokens of another session between any two turns",
        _many(400, 10, 6, (20, 40)),
    ),
    num_crowd=1,
    crowd_tokens=700,
)
SLOW_LINK_TINY: Final = _tiny(
    SLOW_LINK,
    "One agent at a time of 600 to 1,500 tokens, 64 to 96 new ones a turn, on a link that moves the KV of 8,000 tokens "
    "(8 MB) a second",
    _many(600, 5, 11, (64, 96)),
)

SHORT_RUN: Final = tuple(Part(scenario=one, setup=REAL, rounds=5) for one in (AGENT, SHORT_CHAT))
"""`make bench`"""
FULL_RUN: Final = (
    Part(scenario=LONG_AGENT, setup=REAL, rounds=5, max_minutes=20),
    Part(scenario=SHORT_CHAT, setup=REAL, rounds=5, max_minutes=12),
    # Once: without AVX-512 each of its prompts takes a minute and a half to compute, and what it shows is no small
    # difference.
    Part(scenario=LONGEST_AGENT, setup=REAL, rounds=1),
    Part(scenario=LONG_AGENT_TAIL, setup=REAL, rounds=4, max_minutes=25),
    Part(scenario=PRESSED, setup=REAL_PRESSED, rounds=3, max_minutes=15),
    Part(scenario=SLOW_LINK, setup=REAL_SLOW, rounds=3, max_minutes=13),
    # To their end: what they are for are quantiles of 500 turns.
    Part(scenario=LONG_AGENT_TINY, setup=TINY_FAST, rounds=_TINY_ROUNDS),
    Part(scenario=SHORT_CHAT_TINY, setup=TINY_FAST, rounds=_TINY_ROUNDS),
    Part(scenario=PRESSED_TINY, setup=TINY_PRESSED, rounds=_TINY_ROUNDS),
    Part(scenario=SLOW_LINK_TINY, setup=TINY_SLOW, rounds=_TINY_ROUNDS),
)
"""`make bench FULL=1`"""
