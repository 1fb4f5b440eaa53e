"""What is measured: every metric's name, kind, labels and meaning, and the counters that need no library.

`HOME` is counted by the home in D's engine core, `READER` by P's, and both are scraped as a snapshot of plain values;
`TURNS` is counted by the API process that conducted the turn. No label holds anything that a client chose. Pure; may
import the standard library, `bidikv_sdk.wire` and `tickets`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from bidikv_sdk.wire import OUTCOMES

from .tickets import REFUSAL_REASONS

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

Series: TypeAlias = tuple[list[str], float]
"""Label values, and the value."""

Snapshot: TypeAlias = dict[str, list[Series]]
"""All series of each metric, by its name."""

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histograms, from a local hit to a long prompt on a CPU."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's definition.

    - `name`: ends with its unit; a counter's with `_total`.
    - `labels`: names of its labels.
    - `known`: label values whose series exist from the start, at 0; others appear when they happen.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()


def _by(label: str, *values: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    return (label,), tuple((value,) for value in values)


LEASES: Final = Metric(
    "gauge",
    "bidikv_leases",
    "Leases: of idle sessions, of sessions whose turn runs, and finished turns that wait to be settled.",
    *_by("state", "idle", "running", "provisional"),
)
BLOCKS: Final = Metric(
    "gauge",
    "bidikv_blocks",
    "Distinct KV blocks that leases, provisional pins and open tickets hold (one may be in several states), "
    "that are free, and that there are.",
    *_by("state", "leased", "provisional", "ticketed", "free", "total"),
)
BYTES: Final = Metric(
    "gauge",
    "bidikv_bytes",
    "Memory of those blocks.",
    *_by("state", "leased", "provisional", "ticketed", "free", "total"),
)
OPEN_TICKETS: Final = Metric("gauge", "bidikv_open_tickets", "Tickets that a reader may be using.")
SESSIONS: Final = Metric("gauge", "bidikv_sessions", "Session records.", *_by("state", "idle", "running"))
SESSION_BYTES: Final = Metric("gauge", "bidikv_session_bytes", "Memory of the session records, about.")

GRANTS: Final = Metric("counter", "bidikv_lease_grants_total", "Leases granted at the end of a turn.")
FORKS: Final = Metric("counter", "bidikv_lease_forks_total", "Leases that a fork got on its parent's blocks.")
REGAINS: Final = Metric(
    "counter",
    "bidikv_lease_regains_total",
    "Leases that were gone, and got back what of their blocks was still in the prefix cache.",
)
RENEWALS: Final = Metric("counter", "bidikv_lease_renewals_total", "Renewals of leases, by turns and by owners.")
SUPERSEDES: Final = Metric("counter", "bidikv_lease_supersedes_total", "Leases replaced by that of the next turn.")
EXPIRIES: Final = Metric("counter", "bidikv_lease_expiries_total", "Leases whose time was over.")
RELEASES: Final = Metric("counter", "bidikv_lease_releases_total", "Leases given back by their owners.")
REVOCATIONS: Final = Metric(
    "counter",
    "bidikv_lease_revocations_total",
    "Leases taken back whole: for requests that needed the memory, a reset of the prefix cache, or other weights.",
    *_by("reason", "lease_revoked", "model_changed", "reset"),
)
CLIPS: Final = Metric(
    "counter",
    "bidikv_lease_clips_total",
    "Leases that lost their tail to a request, or were granted shorter than their turn.",
    *_by("reason", "lease_revoked", "over_budget"),
)
REJECTIONS: Final = Metric(
    "counter",
    "bidikv_lease_rejections_total",
    "Turns that got no lease at their end.",
    *_by("reason", "over_budget"),
)
REVOKED_BLOCKS: Final = Metric("counter", "bidikv_revoked_blocks_total", "Blocks that leases gave up for requests.")
DROPPED_PINS: Final = Metric(
    "counter",
    "bidikv_provisional_drops_total",
    "Finished turns whose blocks were given back before they were settled: their client left or they kept nothing "
    "(abandoned), nobody settled them in time (lease_expired), or they were revoked as leases are.",
    *_by("reason", "abandoned", "lease_expired", "lease_revoked", "reset", "model_changed"),
)
TICKETS: Final = Metric(
    "counter",
    "bidikv_tickets_total",
    "Tickets opened, returned by their readers, and ended by their deadline.",
    *_by("event", "opened", "returned", "expired"),
)
TICKET_REFUSALS: Final = Metric(
    "counter",
    "bidikv_ticket_refusals_total",
    "Turns that matched a lease and got no ticket.",
    *_by("reason", "below_threshold", "over_budget"),
)
TURN_TIMEOUTS: Final = Metric("counter", "bidikv_turn_timeouts_total", "Turns that nobody settled or abandoned.")
PINNED: Final = Metric(
    "counter",
    "bidikv_pinned_byte_seconds_total",
    "Memory times the time that it was held, by what held it; a block may be held by several.",
    *_by("holder", "lease", "provisional", "ticket"),
)
STALE_READS: Final = Metric(
    "counter",
    "bidikv_stale_reads_total",
    "Reads that were used although they ended when the blocks could have been given away. Must stay 0.",
)

HOME: Final = (
    LEASES, BLOCKS, BYTES, OPEN_TICKETS, SESSIONS, SESSION_BYTES, GRANTS, FORKS, REGAINS, RENEWALS, SUPERSEDES,
    EXPIRIES, RELEASES, REVOCATIONS, CLIPS, REJECTIONS, REVOKED_BLOCKS, DROPPED_PINS, TICKETS, TICKET_REFUSALS,
    TURN_TIMEOUTS, PINNED, STALE_READS,
)  # fmt: skip
"""What a home's snapshot has, all of it, always."""

TICKETS_REFUSED: Final = Metric(
    "counter",
    "bidikv_tickets_refused_total",
    "Tickets that a prefill node did not use, by what was wrong with them.",
    *_by("reason", *REFUSAL_REASONS),
)

READER: Final = (TICKETS_REFUSED,)
"""What a prefill node's snapshot has."""

_OUTCOMES: Final = tuple((outcome,) for outcome in OUTCOMES)

TURNS_ENDED: Final = Metric(
    "counter", "bidikv_turns_total", "Turns answered, by the way they went and why.", ("outcome", "reason")
)
PROMPT_TOKENS: Final = Metric(
    "counter",
    "bidikv_prompt_tokens_total",
    "Prompt tokens of answered turns, by where their KV came from.",
    *_by("source", "fetched", "reused", "computed"),
)
TTFT: Final = Metric(
    "histogram",
    "bidikv_ttft_seconds",
    "Time from the turn's arrival to its first token.",
    ("outcome",),
    _OUTCOMES,
)
PREFILL: Final = Metric(
    "histogram",
    "bidikv_prefill_seconds",
    "Time that the prefill node took for a turn, the read of the lease included.",
    ("outcome",),
    _OUTCOMES,
)

TURNS: Final = (TURNS_ENDED, PROMPT_TOKENS, TTFT, PREFILL)
"""What an API process counts."""

SNAPSHOT_AGE: Final = Metric(
    "gauge", "bidikv_snapshot_age_seconds", "How old the engine's numbers are; above 0 while it is busy."
)

ALL: Final = (*HOME, *READER, *TURNS, SNAPSHOT_AGE)


class Counts:
    """Events since the start, by metric and label values."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def add(self, metric: Metric, *labels: str, amount: int = 1) -> None:
        """Count an event."""
        self._counts[metric.name, labels] += amount

    def get(self, metric: Metric, *labels: str) -> int:
        """Return how often it happened."""
        return self._counts[metric.name, labels]

    def snapshot(self, metrics: tuple[Metric, ...] = HOME) -> Snapshot:
        """Return the counters of `metrics` that have happened or have known series."""
        snapshot: Snapshot = {}
        for (name, labels), value in self._counts.items():
            snapshot.setdefault(name, []).append((list(labels), float(value)))
        for metric in metrics:
            if metric.kind == "counter":
                series = snapshot.setdefault(metric.name, [])
                seen = [one for one, _ in series]
                series += [(list(known), 0.0) for known in metric.known or ((),) if list(known) not in seen]
        return snapshot


class BlockSeconds:
    """Integrates block counts over time, exactly: told of every moment at which a count may change."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._last_s: float | None = None

    def advance(self, num_blocks: Mapping[str, int], *, now_s: float) -> None:
        """Add the time since the last call, during which each holder held so many blocks."""
        elapsed_s = now_s - self._last_s if self._last_s is not None else 0.0
        if elapsed_s > 0:
            totals = self.totals
            for holder, count in num_blocks.items():
                if count:
                    totals[holder] = totals.get(holder, 0.0) + count * elapsed_s
        self._last_s = now_s
