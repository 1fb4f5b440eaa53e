"""Judges the answers: adopt, adopt for these sessions, or do not bother; and the settings to begin with."""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from server_ext.core.settings import HomeSettings

from .limits import Limits
from .memory import settings_to_write
from .questions import FEW_TURNS, Holding
from .replay import Replayed
from .ttft import Savings

Decision = Literal["adopt", "adopt for these sessions", "do not bother"]

WORTH_IT: Final = 0.2
"""Part of its TTFT seconds that a session must save to count: less drowns in what the limits leave out."""
MOST: Final = 0.8
"""Where sessions with this part of all turns are worth it, there is no need to choose."""
FEW: Final = 0.1
"""Where it is less than this part of the turns, choosing is not worth it either."""
_MAX_SESSIONS_NAMED: Final = 20
_MAX_SESSIONS_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do, and why."""

    decision: Decision
    basis: str
    """The baseline that it rests on: `logged` where the log tells cache hits, else `cold`."""
    decisions: dict[str, Decision]
    """By baseline."""
    num_turns: int
    """Later turns that it rests on."""
    reasons: list[str]
    worth_it_share: float
    """Of all turns, those of sessions that save enough."""
    total_gain: dict[str, float]
    """By baseline: part of all TTFT seconds saved, first turns included."""
    rule: str | None
    """Which sessions, where it is not all or none."""
    sessions: list[dict[str, Any]]
    """Those that save the most seconds, the first first."""
    num_sessions: int
    """All that save enough, named above or not."""
    settings: dict[str, Any] | None
    """For `kv_connector_extra_config.bidikv`; None where nothing is to be set."""

    @property
    def headline(self) -> str:
        """The decision in a few words, with its condition."""
        text = self.decision[0].upper() + self.decision[1:]
        if self.basis == "cold" and self.decisions["warm"] != self.decision:
            text += ", where P's own cache loses the session between turns"
        if self.num_turns < FEW_TURNS:
            text += f" (later turns: {self.num_turns}, too few to rely on)"
        return text

    @property
    def which(self) -> str:
        """Those that save the most, by name, and how many others save enough."""
        names = [one["session"] for one in self.sessions[:_MAX_SESSIONS_SHOWN]]
        num_others = self.num_sessions - len(names)
        return ", ".join(names) + (f" and {num_others:,} others" if num_others else "")

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {**asdict(self), "headline": self.headline}


def judge(savings: Savings, holding: Holding, limits: Limits, *, num_without_content: int = 0) -> Verdict:
    """Decide; of all turns `num_without_content` do not tell what is in their prompts."""
    shares = {name: _worth_it_share(savings, name) for name in savings.gains}
    decisions = {name: _decide(share) for name, share in shares.items()}
    decision, turns = decisions[savings.basis], savings.num_turns
    reasons = _reasons(savings, holding, limits, shares[savings.basis], decisions)
    if num_without_content:
        reasons.append(
            f"{num_without_content:,} turns do not tell what is in their prompts and count as repeating nothing: "
            "log messages, text, token ids or block hashes"
        )
    gain = savings.gains[savings.basis]
    is_worth_it = (gain >= WORTH_IT) & (turns > 0)
    chosen = np.flatnonzero(is_worth_it)
    sessions = [
        {
            "number": int(n),
            "saved_s": float(savings.saved_s[n]),
            "gain": float(gain[n]),
            "num_turns": int(turns[n]),
            "mean_prompt_tokens": float(savings.mean_prompt_tokens[n]),
        }
        for n in chosen[np.argsort(-savings.saved_s[chosen])][:_MAX_SESSIONS_NAMED].tolist()
    ]
    return Verdict(
        decision=decision,
        basis=savings.basis,
        decisions=decisions,
        num_turns=savings.num_later_turns,
        reasons=reasons,
        worth_it_share=shares[savings.basis],
        total_gain=savings.total_gain,
        rule=_rule(savings, is_worth_it) if decision == "adopt for these sessions" else None,
        sessions=sessions,
        num_sessions=len(chosen),
        settings=None if decision == "do not bother" else _settings(holding.best),
    )


def _worth_it_share(savings: Savings, name: str) -> float:
    turns = savings.num_turns
    return float(turns[(savings.gains[name] >= WORTH_IT) & (turns > 0)].sum() / max(1, turns.sum()))


def _decide(share: float) -> Decision:
    if share >= MOST:
        return "adopt"
    return "adopt for these sessions" if share >= FEW else "do not bother"


def _rule(savings: Savings, is_worth_it: Any) -> str:
    """Say what the sessions that are worth it have in common: the threshold that parts them best."""
    tokens = savings.mean_prompt_tokens
    candidates = np.unique(np.quantile(tokens[savings.num_turns > 0], np.linspace(0, 1, 41), method="lower"))[::-1]
    hits = [float((savings.num_turns * ((tokens >= at) == is_worth_it)).sum()) for at in candidates]
    at = candidates[int(np.argmax(hits))]
    right = max(hits) / max(1, savings.num_turns.sum())
    least_turns = int(savings.num_turns[is_worth_it].min())
    return (
        f"sessions of at least {least_turns} turns with prompts of {at:,.0f} tokens or more on average "
        f"(right for {right:.0%} of the turns)"
    )


def _reasons(
    savings: Savings, holding: Holding, limits: Limits, share: float, decisions: dict[str, Decision]
) -> list[str]:
    gain = savings.total_gain
    reasons = [
        f"sessions with {share:.0%} of the turns would save {WORTH_IT:.0%} or more of their time to first token",
        f"this rests on {savings.num_later_turns:,} turns that are not the first of their session",
    ]
    if savings.basis == "logged":
        reasons.append(
            f"against the cache hits that the log reports, {gain['logged']:.0%} of all TTFT seconds are saved"
        )
    reasons.append(
        f"of all TTFT seconds {gain['cold']:.0%} are saved where P's own prefix cache has lost the session "
        f"(several Ps, or evicted), {gain['warm']:.0%} where it still has the whole prompt before"
    )
    if decisions["warm"] != decisions["cold"] and savings.basis == "cold":
        reasons.append(
            "so it depends on P's hit rate, which this log does not tell (log `cached_tokens`): "
            f"cold: {decisions['cold']}, always warm: {decisions['warm']}"
        )
    even = limits.break_even_tokens
    link = "the measured link" if limits.is_measured else limits.link.name
    too_late = even > limits.model.max_context_tokens
    tail = f", which is more than {limits.model.name} takes" if too_late else " of history on"
    reasons.append(f"over {link} fetching beats computing from {even:,.0f} tokens{tail}")
    if holding.best is None:
        reasons.append(
            "the log has no times, or for too few turns: how long a lease must live cannot be said; "
            "TTFT assumes that it does"
        )
    else:
        best = holding.best
        reasons.append(
            f"a lease of {best.ttl_s:g} s within {best.budget_fraction:.0%} of D's cache keeps {best.held_share:.0%} "
            f"of the reusable tokens until the next turn"
        )
    return reasons


def _settings(best: Replayed | None) -> dict[str, Any]:
    # From which length on fetching pays is left to `auto`, which measures it.
    route = {"default_route": HomeSettings().default_route}
    return route if best is None else route | settings_to_write(best.budget_fraction, best.ttl_s)
