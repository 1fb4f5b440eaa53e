"""What a run saw: one record per turn while it runs, percentiles and shares at its end."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bidikv_sdk.wire import OUTCOMES, REASONS
from server_ext.core import metrics

if TYPE_CHECKING:
    from bidikv_sdk.wire import Outcome, Reason

    from .engines import DecodeEngine, PrefillEngine
    from .fleet import FleetConfig
    from .turn import Turn

_OUTCOME_NUMBERS: "Final[dict[Outcome, int]]" = {outcome: n for n, outcome in enumerate(OUTCOMES)}
_REASON_NUMBERS: "Final[dict[Reason, int]]" = {reason: n for n, reason in enumerate(REASONS)}
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The figures of a run; times in seconds, shares parts of 1. Percentiles are None where there is nothing."""

    num_sessions: int
    num_turns: int
    """Answered, in the whole run."""
    num_judged: int
    """Those that the percentiles and shares are of."""
    refused: dict[str, int]
    """Turns that no engine could serve, which ended their session: longer than the context, or than the pool."""
    duration_s: float
    """Simulated, until the last answer."""
    turns_per_s: float
    """Of the judged ones, begun per second of their window."""
    first_ttft_s: dict[str, float] | None
    """Of first turns."""
    later_ttft_s: dict[str, float] | None
    queue_s: dict[str, float] | None
    """Of later turns: what the time to the first token has more than on an idle fleet."""
    token_s: dict[str, float] | None
    """Between two tokens of an answer, its mean, over answers."""
    outcomes: dict[str, float]
    """Of later turns."""
    reasons: dict[str, float]
    """Of later turns."""
    tokens: dict[str, int]
    """Prompt tokens of all turns: `prompt`, of which `reused`, `fetched` and `computed`."""
    leases: dict[str, int]
    """`granted`, `expired`, `revoked`, `clipped` (by pressure), `over_budget` (clipped or none at all)."""
    utilisation: dict[str, float]
    """`prefill`, `decode`, `links`: part of the time that the mean one was busy; `links_max` is the busiest port's."""
    pinned_byte_s: float
    """Bytes that leases held, times seconds."""
    pinned_byte_s_per_avoided_token: float | None
    """Of the prompt tokens that were fetched, or found on D in `local`."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


class Recorder:
    """Collects turns; a turn takes about 50 bytes."""

    def __init__(self) -> None:
        self.window_s = (0.0, float("inf"))
        self._started = array("d")
        self._ttft, self._idle, self._token = array("f"), array("f"), array("f")
        self._number = array("i")
        self._outcome, self._reason = array("b"), array("b")
        self._tokens: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._busy: list[tuple[float, npt.NDArray[np.float64]]] = []
        self._num_sessions = 0

    def refuse(self, why: str) -> None:
        """Count a turn that cannot be served."""
        self._refused[why] += 1

    def add(self, turn: "Turn", *, is_forced: bool, end_s: float) -> None:
        """Record a turn that ends now; `is_forced` tells that its way was asked for."""
        outcome: Outcome
        fetched, cached, prompt = turn.fetched_tokens, turn.cached_tokens, turn.prompt_tokens
        if turn.way == "local":
            outcome = "local" if cached else "recomputed"
        else:
            outcome = "fetched" if fetched else "prefilled" if cached else "recomputed"
        num_output = turn.plan.output_tokens
        self._started.append(turn.started_s)
        self._ttft.append(turn.first_token_s - turn.started_s)
        self._idle.append(turn.idle_s)
        self._token.append((end_s - turn.first_token_s) / (num_output - 1) if num_output > 1 else float("nan"))
        self._number.append(turn.number)
        self._outcome.append(_OUTCOME_NUMBERS[outcome])
        self._reason.append(_REASON_NUMBERS[_reason(turn, is_forced=is_forced)])
        self._num_sessions += turn.number == 1
        tokens = self._tokens
        tokens["prompt"] += prompt
        tokens["reused"] += cached
        tokens["local"] += cached if turn.way == "local" else 0
        tokens["fetched"] += fetched
        tokens["computed"] += prompt - cached - fetched

    def take_busy(
        self, prefills: "Sequence[PrefillEngine]", decodes: "Sequence[DecodeEngine]", *, now_s: float
    ) -> None:
        """Note how long everything has been busy so far."""
        for prefill in prefills:
            prefill.advance(now_s=now_s)
        for home in decodes:
            home.batch.advance(now_s=now_s)
        ports = [port for prefill in prefills for port in (prefill.inbound, prefill.outbound)]
        ports += [port for home in decodes for port in (home.inbound, home.outbound)]
        seconds = (
            sum(engine.busy_s for engine in prefills) / max(1, len(prefills)),
            sum(home.batch.busy_s for home in decodes) / len(decodes),
            sum(port.busy_s for port in ports) / len(ports),
            max(port.busy_s for port in ports),
        )
        self._busy.append((now_s, np.array(seconds)))

    def results(
        self,
        config: "FleetConfig",
        prefills: "Sequence[PrefillEngine]",
        decodes: "Sequence[DecodeEngine]",
        *,
        end_s: float,
    ) -> Results:
        """Return the figures; the run has ended."""
        if not self._busy:
            self._busy.append((0.0, np.zeros(4)))
            self.take_busy(prefills, decodes, now_s=end_s)
        started = np.frombuffer(self._started, dtype=np.float64)
        judged = (started >= self.window_s[0]) & (started <= self.window_s[1])
        is_later = np.frombuffer(self._number, dtype=np.int32) > 1
        later = judged & is_later
        ttft, idle = np.frombuffer(self._ttft, dtype=np.float32), np.frombuffer(self._idle, dtype=np.float32)
        window_s = min(self.window_s[1], end_s) - self.window_s[0]
        utilisation = self._utilisation()
        pinned = self._pinned_byte_s(config, decodes, end_s)
        avoided = self._tokens["local"] + self._tokens["fetched"]
        return Results(
            num_sessions=self._num_sessions,
            num_turns=len(started),
            num_judged=int(judged.sum()),
            refused=dict(self._refused),
            duration_s=end_s,
            turns_per_s=float(judged.sum() / window_s) if window_s > 0 else 0.0,
            first_ttft_s=_quantiles(ttft[judged & ~is_later]),
            later_ttft_s=_quantiles(ttft[later]),
            queue_s=_quantiles(np.maximum(ttft - idle, 0)[later]),
            token_s=_quantiles(np.frombuffer(self._token, dtype=np.float32)[judged]),
            outcomes=_shares(np.frombuffer(self._outcome, dtype=np.int8)[later], OUTCOMES),
            reasons=_shares(np.frombuffer(self._reason, dtype=np.int8)[later], REASONS),
            tokens={name: self._tokens[name] for name in ("prompt", "reused", "fetched", "computed")},
            leases=_lease_counts(decodes),
            utilisation=utilisation,
            pinned_byte_s=pinned,
            pinned_byte_s_per_avoided_token=pinned / avoided if avoided else None,
        )

    def _utilisation(self) -> dict[str, float]:
        (begin_s, begin), (end_s, end) = self._busy[0], self._busy[-1]
        shares = (end - begin) / max(end_s - begin_s, 1e-9)
        return dict(zip(("prefill", "decode", "links", "links_max"), shares.tolist(), strict=True))

    def _pinned_byte_s(self, config: "FleetConfig", decodes: "Sequence[DecodeEngine]", end_s: float) -> float:
        block_bytes = config.chunk_tokens * config.rates.kv_bytes_per_token
        # The last leases run out behind the last answer; an extended one may live longest.
        end_s += config.settings.max_ttl_s
        total = 0.0
        for home in decodes:
            home.memory.catch_up(end_s)
            found = home.memory.table.snapshot(now_s=end_s, block_bytes=block_bytes)[metrics.PINNED.name]
            total += sum(value for labels, value in found if "lease" in labels)
        return total


def _reason(turn: "Turn", *, is_forced: bool) -> "Reason":
    """Say why a turn went its way, as the server does."""
    begun = turn.request.begun
    if is_forced:
        return "forced"
    if turn.is_ticket_late:
        return "ticket_late"
    if begun.lease_reason is not None:
        return begun.lease_reason
    if begun.ticket_reason is not None:
        return begun.ticket_reason
    if turn.plan.kept_tokens is not None and turn.number > 1:
        return "messages_changed"
    return "cheapest"


def _lease_counts(decodes: "Sequence[DecodeEngine]") -> dict[str, int]:
    counts = [home.memory.table.counts for home in decodes]
    pressure, over = "lease_revoked", "over_budget"
    return {
        "granted": sum(one.get(metrics.GRANTS) for one in counts),
        "expired": sum(one.get(metrics.EXPIRIES) for one in counts),
        "revoked": sum(one.get(metrics.REVOCATIONS, pressure) for one in counts),
        "clipped": sum(one.get(metrics.CLIPS, pressure) for one in counts),
        "over_budget": sum(one.get(metrics.CLIPS, over) + one.get(metrics.REJECTIONS, over) for one in counts),
    }


def _quantiles(values: Any) -> dict[str, float] | None:
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    found = np.quantile(values, list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, found), strict=True))


def _shares(numbers: Any, words: Sequence[str]) -> dict[str, float]:
    counts = np.bincount(numbers, minlength=len(words)) if numbers.size else np.zeros(len(words))
    return {word: count / numbers.size for word, count in zip(words, counts.tolist(), strict=True) if count}
