"""What `make bench` runs: scenarios, the engines of each, and how often. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bench._setups import AGGREGATED, HOLD_S, Setup
from server_ext.benchmark.arms import ROUTES
from server_ext.benchmark.scenarios import Scenario, growing, stepping
from server_ext.launch.model import SMOLLM2
from server_ext.launch.tiny import TINY

ARMS: Final = (*ROUTES, *HOLD_S, AGGREGATED)
"""The first one is what all are compared with."""
_DELTA: Final = (64, 128)
_MAX_DELTA: Final = 200  # an agent's short turns stay below, and what brings it to the next length is above
_ANSWER: Final = 16
_TINY_ANSWER: Final = 8

# Sizes of the scenarios with a link or a crowd: short enough that others' prompts fill P between any two turns.
_SMALL_FIRST: Final = 900
_SMALL_LEN: Final = 1_536


@dataclass(frozen=True, kw_only=True)
class Part:
    """One scenario of a run."""

    scenario: Scenario
    setup: Setup
    rounds: int


REAL: Final = Setup(name="real", model=SMOLLM2)
REAL_PRESSED: Final = Setup(name="real_pressed", model=SMOLLM2, prefill_tokens=_SMALL_LEN, max_model_len=_SMALL_LEN)
REAL_SLOW: Final = Setup(name="real_slow", model=SMOLLM2, link_tokens_per_s=430.0)
TINY_FAST: Final = Setup(name="tiny", model=TINY)
TINY_PRESSED: Final = Setup(name="tiny_pressed", model=TINY, prefill_tokens=_SMALL_LEN, max_model_len=_SMALL_LEN)
TINY_SLOW: Final = Setup(name="tiny_slow", model=TINY, link_tokens_per_s=10_000.0)

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
LONGER_AGENT: Final = replace(
    LONG_AGENT,
    what="One agent at a time, brought to 2,000, 3,000 and then 6,000 tokens: at each length turns of 64 to 128 new "
    "tokens, 16 generated; the last two at 3,000 beside two requests that decode all the time.",
    plan=stepping((2_000, 3_000, 6_000), turns_at_each=(2, 4, 2), delta_tokens=_DELTA, output_tokens=_ANSWER),
    points=(2_000, 3_000, 6_000),
)
LONG_AGENT_TAIL: Final = Scenario(
    name="long_agent_tail",
    what="The same agent near 2,000 tokens only, with enough turns for a 99th percentile, 8 generated.",
    plan=growing((1_700,) * 3, num_turns=9, delta_tokens=_DELTA, output_tokens=_TINY_ANSWER),
    arms=("no_reuse", "fetch"),
    points=(2_000,),
)
SHORT_CHAT: Final = Scenario(
    name="short_chat",
    what="One chat at a time: a first prompt of 150 tokens, 30 to 60 new tokens a turn, 16 generated; the last two of "
    "its five turns beside two requests that decode all the time.",
    plan=growing((150, 150), num_turns=5, delta_tokens=(30, 60), output_tokens=_ANSWER),
    arms=ARMS,
    turns_beside=range(4, 6),
    num_beside=2,
)
PRESSED: Final = Scenario(
    name="prefill_pressure",
    what="One agent at a time of 900 to 1,400 tokens, 64 to 96 new ones a turn, 16 generated. P has room for "
    f"{_SMALL_LEN:,} tokens, and computes three prompts of 500 tokens of other sessions between any two turns. No "
    "cache is emptied.",
    plan=growing((_SMALL_FIRST,), num_turns=5, delta_tokens=(64, 96), output_tokens=_ANSWER),
    arms=ARMS,
    num_crowd=3,
    crowd_tokens=500,
)
SLOW_LINK: Final = Scenario(
    name="slow_link",
    what="The same agent, P undisturbed, on a link that moves 430 tokens' KV (20 MB) a second: fetching a history "
    "takes longer than computing it.",
    plan=growing((_SMALL_FIRST,), num_turns=5, delta_tokens=(64, 96), output_tokens=_ANSWER),
    arms=ARMS,
)


def _tiny(scenario: Scenario, first: tuple[int, ...], num_turns: int, delta: tuple[int, int], what: str) -> Scenario:
    """Return a scenario with many short turns, for quantiles; all of them alone."""
    return replace(
        scenario,
        name=f"{scenario.name}_tiny",
        what=f"{what} Tiny random model, for quantiles: what a turn costs beside computing.",
        plan=growing(first, num_turns=num_turns, delta_tokens=delta, output_tokens=_TINY_ANSWER),
        points=(),
        max_delta=None,
        turns_beside=(),
        num_beside=0,
    )


LONG_AGENT_TINY: Final = _tiny(
    LONG_AGENT, (2_000,) * 7, 16, _DELTA, "One agent at a time of 2,000 to 3,600 tokens, 64 to 128 new ones a turn."
)
SHORT_CHAT_TINY: Final = _tiny(
    SHORT_CHAT, (150,) * 12, 10, (30, 60), "One chat at a time of 150 to 650 tokens, 30 to 60 new ones a turn."
)
PRESSED_TINY: Final = _tiny(PRESSED, (_SMALL_FIRST,) * 21, 6, (64, 96), PRESSED.what)
SLOW_LINK_TINY: Final = _tiny(
    SLOW_LINK,
    (_SMALL_FIRST,) * 21,
    6,
    (64, 96),
    "One agent at a time of 900 to 1,400 tokens, 64 to 96 new ones a turn, on a link that moves 10,000 tokens' KV a "
    "second.",
)

SHORT_RUN: Final = tuple(Part(scenario=one, setup=REAL, rounds=5) for one in (LONG_AGENT, SHORT_CHAT))
"""`make bench`"""
FULL_RUN: Final = (
    Part(scenario=LONGER_AGENT, setup=REAL, rounds=5),
    Part(scenario=SHORT_CHAT, setup=REAL, rounds=5),
    Part(scenario=LONG_AGENT_TAIL, setup=REAL, rounds=5),
    Part(scenario=PRESSED, setup=REAL_PRESSED, rounds=5),
    Part(scenario=SLOW_LINK, setup=REAL_SLOW, rounds=5),
    Part(scenario=LONG_AGENT_TINY, setup=TINY_FAST, rounds=5),
    Part(scenario=SHORT_CHAT_TINY, setup=TINY_FAST, rounds=5),
    Part(scenario=PRESSED_TINY, setup=TINY_PRESSED, rounds=5),
    Part(scenario=SLOW_LINK_TINY, setup=TINY_SLOW, rounds=5),
)
"""`make bench FULL=1`"""
