"""What a run saw: one record per turn while it runs, percentiles and shares at its end."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import add
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bidikv_sdk.wire import OUTCOMES, REASONS
from server_ext.core import metrics

if TYPE_CHECKING:
    from bidikv_sdk.wire import Outcome, Reason

    from .config import FleetConfig
    from .engines import DecodeEngine, PrefillEngine
    from .turn import Turn

_OUTCOME_NUMBERS: "Final[dict[Outcome, int]]" = {outcome: n for n, outcome in enumerate(OUTCOMES)}
_REASON_NUMBERS: "Final[dict[Reason, int]]" = {reason: n for n, reason in enumerate(REASONS)}
_LEASES: Final = ("granted", "expired", "revoked", "clipped", "over_budget")
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
        self._prompt = self._reused = self._local = self._fetched = 0
        self._refused: Counter[str] = Counter()
        self._busy: list[_Busy] = []
        self._num_sessions = 0
        self._leases: Counter[str] = Counter()
        self._pinned_byte_s = 0.0
        self._end_s = 0.0

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
        self._prompt += prompt
        self._reused += cached
        self._fetched += fetched
        if turn.way == "local":
            self._local += cached

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
        sums = (
            sum(engine.busy_s for engine in prefills),
            sum(home.batch.busy_s for home in decodes),
            sum(port.busy_s for port in ports),
        )
        self._busy.append(_Busy(now_s, sums, (len(prefills), len(decodes), len(ports)), max(p.busy_s for p in ports)))

    def close(
        self,
        config: "FleetConfig",
        prefills: "Sequence[PrefillEngine]",
        decodes: "Sequence[DecodeEngine]",
        *,
        end_s: float,
    ) -> None:
        """Take from the engines what they have counted; the run has ended."""
        self._end_s = end_s
        if not self._busy:
            self.take_busy(prefills, decodes, now_s=end_s)
            self._busy.insert(0, self._busy[0].at_start())
        self._pinned_byte_s += _pinned_byte_s(config, decodes, end_s)
        self._leases.update(_lease_counts(decodes))

    def add_group(self, other: "Recorder") -> None:
        """Add what another group of the same fleet has seen, in the same window; both are closed."""
        for name in _COLUMNS:
            getattr(self, name).extend(getattr(other, name))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._end_s = max(self._end_s, other._end_s)  # noqa: SLF001 (of this class)
        self._busy = [one.with_group(two) for one, two in zip(self._busy, other._busy, strict=True)]  # noqa: SLF001

    def results(self) -> Results:
        """Return the figures; the recorder is closed."""
        started = np.frombuffer(self._started, dtype=np.float64)
        judged = (started >= self.window_s[0]) & (started <= self.window_s[1])
        is_later = np.frombuffer(self._number, dtype=np.int32) > 1
        later = judged & is_later
        ttft, idle = np.frombuffer(self._ttft, dtype=np.float32), np.frombuffer(self._idle, dtype=np.float32)
        window_s = min(self.window_s[1], self._end_s) - self.window_s[0]
        avoided = self._local + self._fetched
        return Results(
            num_sessions=self._num_sessions,
            num_turns=len(started),
            num_judged=int(judged.sum()),
            refused=dict(self._refused),
            duration_s=self._end_s,
            turns_per_s=float(judged.sum() / window_s) if window_s > 0 else 0.0,
            first_ttft_s=_quantiles(ttft[judged & ~is_later]),
            later_ttft_s=_quantiles(ttft[later]),
            queue_s=_quantiles(np.maximum(ttft - idle, 0)[later]),
            token_s=_quantiles(np.frombuffer(self._token, dtype=np.float32)[judged]),
            outcomes=_shares(np.frombuffer(self._outcome, dtype=np.int8)[later], OUTCOMES),
            reasons=_shares(np.frombuffer(self._reason, dtype=np.int8)[later], REASONS),
            tokens={
                "prompt": self._prompt,
                "reused": self._reused,
                "fetched": self._fetched,
                "computed": self._prompt - self._reused - self._fetched,
            },
            leases={name: self._leases[name] for name in _LEASES},
            utilisation=self._utilisation(),
            pinned_byte_s=self._pinned_byte_s,
            pinned_byte_s_per_avoided_token=self._pinned_byte_s / avoided if avoided else None,
        )

    def _utilisation(self) -> dict[str, float]:
        begin, end = self._busy[0], self._busy[-1]
        shares = (np.array(end.means()) - np.array(begin.means())) / max(end.now_s - begin.now_s, 1e-9)
        return dict(zip(("prefill", "decode", "links", "links_max"), shares.tolist(), strict=True))


_COLUMNS: Final = ("_started", "_ttft", "_idle", "_token", "_number", "_outcome", "_reason")
"""Of a `Recorder`: one value a turn."""
_SUMS: Final = (
    "_prompt", "_reused", "_local", "_fetched", "_refused", "_num_sessions", "_leases", "_pinned_byte_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Busy:
    """How long prefill engines, decode engines and ports have been busy so far."""

    now_s: float
    sums_s: tuple[float, ...]
    nums: tuple[int, ...]
    longest_s: float
    """Of the ports."""

    def at_start(self) -> "_Busy":
        """Return the same before anything was busy."""
        return _Busy(0.0, (0.0, 0.0, 0.0), self.nums, 0.0)

    def with_group(self, other: "_Busy") -> "_Busy":
        """Return both together."""
        return _Busy(
            max(self.now_s, other.now_s),
            tuple(map(add, self.sums_s, other.sums_s)),
            tuple(map(add, self.nums, other.nums)),
            max(self.longest_s, other.longest_s),
        )

    def means(self) -> tuple[float, ...]:
        """Return the seconds of the mean prefill engine, decode engine and port, and of the busiest port."""
        return *(seconds / max(1, num) for seconds, num in zip(self.sums_s, self.nums, strict=True)), self.longest_s


def _pinned_byte_s(config: "FleetConfig", decodes: "Sequence[DecodeEngine]", end_s: float) -> float:
    block_bytes = config.chunk_tokens * config.rates.kv_bytes_per_token
    # The last leases run out behind the last answer; an extended one may live longest.
    end_s += config.settings.max_ttl_s
    total = 0.0
    for home in decodes:
        home.memory.table.catch_up(now_s=end_s)
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
