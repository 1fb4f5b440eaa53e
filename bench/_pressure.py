"""What the pressure run found, and whether that is good enough. Pure.

`summary` is one arm under one load, all its rounds together; `Report` has them all, judges them (`bars`), and is the
file. Times are as the clients saw them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

from bench._pressure_load import ANSWER_TOKENS, OTHER_TOKENS, POOL_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bench._others import Other
    from bench._pressure_cell import Cell
    from bench._reference import Verdict

NO_LEASES: Final = "no_leases"
BIDIKV: Final = "bidikv"
STOCK: Final = "stock_bidirectional"
STOCK_TUNED: Final = "stock_bidirectional_tuned"
ARMS: Final = (NO_LEASES, BIDIKV, STOCK, STOCK_TUNED)

MAX_ITL_RATIO: Final = 1.1
WARM_UP_S: Final = 2.0
"""Of each measurement: the streams begin together, which is nobody's load."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One expectation: `value` is at most `limit`, or at least where `at_least`."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether it is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the bar as the file has it."""
        return {**asdict(self), "pass": self.passed}


def gaps_ms(others: Iterable[Other], from_s: float, to_s: float) -> list[float]:
    """Return the times between tokens of the same stream, in milliseconds, of those that came in a window."""
    return [
        (after - before) * 1000
        for other in others
        for before, after in pairwise(other.chunk_s)
        if from_s <= after <= to_s
    ]


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile; None where there are too few values."""
    if len(values) < 2:
        return None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def summary(cells: Sequence[Cell], verdict: Callable[[Sequence[int], Sequence[int]], Verdict]) -> dict[str, Any]:
    """Return the numbers of one arm under one load.

    Args:
        cells: its rounds, at least one.
        verdict: of a prompt and the tokens of its answer, how they compare with a cold recompute.
    """
    return {**_of_others(cells), **_of_sessions(cells), **_of_engine(cells), **_of_tokens(cells, verdict)}


def _of_others(cells: Sequence[Cell]) -> dict[str, Any]:
    rounds = [gaps_ms(cell.others, cell.start_s + WARM_UP_S, cell.end_s) for cell in cells]
    gaps = [gap for gaps in rounds for gap in gaps]
    others = [other for cell in cells for other in cell.others]
    ended = [other for other in others if other.cached_tokens is not None]
    first_s = [other.chunk_s[0] - other.sent_s for other in others if other.chunk_s]
    num_tokens = sum(
        cell.start_s + WARM_UP_S <= at_s <= cell.end_s
        for cell in cells
        for other in cell.others
        for at_s in other.chunk_s
    )
    seconds = sum(cell.end_s - cell.start_s - WARM_UP_S for cell in cells)
    return {
        "itl_p50_ms": _rounded(percentile(gaps, 50)),
        "itl_p95_ms": _rounded(percentile(gaps, 95)),
        "itl_p99_ms": _rounded(percentile(gaps, 99)),
        "itl_p95_ms_of_rounds": [_rounded(percentile(gaps, 95)) for gaps in rounds],
        "num_itl": len(gaps),
        "others_tokens_per_s": _rounded(num_tokens / seconds),
        "ttft_p50_s": _rounded(median(first_s) if first_s else None, 4),
        "ttft_p95_s": _rounded(percentile(first_s, 95), 4),
        "others_answered": len(ended),
        "others_unanswered": len(others) - len(ended) - sum(other.error is not None for other in others),
        "others_hit_rate": _rounded(
            sum(other.cached_tokens or 0 for other in ended) / sum(len(other.prompt_ids) for other in ended)
            if ended
            else None,
            4,
        ),
    }


def _of_sessions(cells: Sequence[Cell]) -> dict[str, Any]:
    asked = [one for cell in cells for one in cell.asked]
    answered = [one for one in asked if one.answer is not None]
    took_s = [one.ended_s - one.sent_s for one in answered if one.ended_s is not None]
    return {
        "turns_answered": len(answered),
        "turns_unanswered": sum(one.ended_s is None for one in asked),
        "turn_p50_s": _rounded(median(took_s) if took_s else None, 4),
        "turn_p95_s": _rounded(percentile(took_s, 95), 4),
        "outcomes": dict(
            sorted(Counter(_came(one.answer.outcome, one.answer.reason) for one in answered if one.answer).items())
        ),
        "demanded_percent": round(100 * max(cell.peaks.demanded for cell in cells) / POOL_BLOCKS),
    }


def _came(outcome: str, reason: str | None) -> str:
    return f"{outcome}: {reason}" if reason else outcome


def _of_engine(cells: Sequence[Cell]) -> dict[str, Any]:
    # Stock engines have no leases, and count none; on ours whatever is not served is an error.
    with_leases = [cell for cell in cells if cell.arm == BIDIKV]

    def grown(name: str, *, of: Sequence[Cell] = with_leases, **labels: str) -> int:
        return round(sum(cell.after.get(name, **labels) - cell.before.get(name, **labels) for cell in of))

    def grown_by_reason(name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for cell in with_leases:
            total.update(cell.after.by(name, "reason"))
            total.subtract(cell.before.by(name, "reason"))
        return {reason: round(number) for reason, number in sorted(total.items())}

    shed = {kind: grown_by_reason(f"bidikv_lease_{kind}_total") for kind in ("revocations", "clips", "rejections")}
    return {
        "preemptions": grown("vllm:num_preemptions_total", of=cells),
        "leases_granted": grown("bidikv_lease_grants_total"),
        "leases_shed": {kind: reasons for kind, reasons in shed.items() if reasons},
        "revoked_blocks": grown("bidikv_revoked_blocks_total"),
        "leases_expired": grown("bidikv_lease_expiries_total"),
        "tickets_opened": grown("bidikv_tickets_total", event="opened"),
        "tickets_refused": grown_by_reason("bidikv_ticket_refusals_total"),
        "stale_reads": grown("bidikv_stale_reads_total"),
        "held_blocks_peak": max(cell.peaks.held for cell in cells),
        "ticket_blocks_peak": max(cell.peaks.ticketed for cell in cells),
        "pool_used_peak": _rounded(max(cell.peaks.used for cell in cells)),
        "blocks_left": max((cell.blocks_left for cell in cells if cell.blocks_left is not None), default=None),
    }


def _of_tokens(cells: Sequence[Cell], verdict: Callable[[Sequence[int], Sequence[int]], Verdict]) -> dict[str, Any]:
    others = [other for cell in cells for other in cell.others]
    turns = [one.answer for cell in cells for one in cell.asked if one.answer is not None]
    answers = [(one.prompt_ids, one.token_ids) for one in others] + [(one.prompt_ids, one.token_ids) for one in turns]
    verdicts = [verdict(*answer) for answer in answers]
    # What came is right as far as it goes: a token that a whole answer lacks is wrong as well.
    missing = sum(abs(OTHER_TOKENS - len(one.token_ids)) for one in others if _has_ended(one))
    missing += sum(abs(ANSWER_TOKENS - len(one.token_ids)) for one in turns)
    texts = [one.error for cell in cells for one in cell.others] + [one.error for cell in cells for one in cell.asked]
    errors = [text for text in texts if text is not None]
    return {
        "tokens_checked": sum(len(ids) for _, ids in answers),
        "tokens_wrong": sum(one.num_wrong for one in verdicts) + missing,
        "near_ties": sum(one.num_near_ties for one in verdicts),
        "errors": len(errors),
        "error_texts": sorted(set(errors))[:5],
    }


def _has_ended(other: Other) -> bool:
    return other.cached_tokens is not None and other.error is None


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class Report:
    """All arms under all loads.

    * **load** - percent of the pool -> arm -> `summary`.
    * **setup** - what was run: sizes, times, rounds.
    * **machine**, **versions** - of it.
    """

    load: Mapping[int, Mapping[str, Mapping[str, Any]]]
    setup: Mapping[str, Any]
    machine: str
    versions: Mapping[str, str]

    def bars(self) -> list[Bar]:
        """Judge our arm against the one without leases."""
        return [bar for percent, arms in self.load.items() for bar in _bars(percent, arms[BIDIKV], arms[NO_LEASES])]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Report:
        """Return the report of a file's content; the bars are judged anew."""
        load = {int(percent): arms for percent, arms in content["load"].items()}
        return cls(load, content["setup"], content["machine"], content["versions"])

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "machine": self.machine,
            "versions": dict(self.versions),
            "setup": dict(self.setup),
            "load": {str(percent): dict(arms) for percent, arms in self.load.items()},
            "bars": [bar.to_json() for bar in self.bars()],
        }


def _bars(percent: int, ours: Mapping[str, Any], without: Mapping[str, Any]) -> list[Bar]:
    unanswered = ours["others_unanswered"] + ours["turns_unanswered"]
    return [
        Bar(f"{percent} %: sessions would hold, in % of the pool", ours["demanded_percent"], percent, at_least=True),
        # Not the difference, which is 0 as well where both had many, each for a reason of its own.
        Bar(f"{percent} %: preemptions, no more than without leases", ours["preemptions"], without["preemptions"]),
        Bar(f"{percent} %: others' inter-token p95, of that without leases", itl_ratio(ours, without), MAX_ITL_RATIO),
        # A grant that the budget made shorter would not do: leases must have given way to a request.
        Bar(f"{percent} %: blocks that leases gave up for requests", ours["revoked_blocks"], 1, at_least=True),
        Bar(f"{percent} %: not answered (deadlock)", unanswered, 0),
        Bar(f"{percent} %: errors", ours["errors"], 0),
        Bar(f"{percent} %: wrong tokens", ours["tokens_wrong"], 0),
        Bar(f"{percent} %: stale reads", ours["stale_reads"], 0),
        Bar(f"{percent} %: blocks left behind", ours["blocks_left"], 0),
    ]


def itl_ratios(ours: Mapping[str, Any], without: Mapping[str, Any]) -> list[float]:
    """Return each round's: others' inter-token p95 beside our leases, of that without any."""
    rounds = zip(ours["itl_p95_ms_of_rounds"], without["itl_p95_ms_of_rounds"], strict=True)
    return [_ratio(own, base) for own, base in rounds]


def pooled_itl_ratio(ours: Mapping[str, Any], without: Mapping[str, Any]) -> float:
    """Return the same of all rounds' times together: shown, not judged (see `itl_ratio`)."""
    return _ratio(ours["itl_p95_ms"], without["itl_p95_ms"])


def itl_ratio(ours: Mapping[str, Any], without: Mapping[str, Any]) -> float:
    """Return the median over the rounds, which is judged.

    Either arm's part of a round was measured right beside the other's. What disturbs the machine for a while falls on
    one part, and moves the percentile of all rounds together as much as a real cost would; of three rounds the median
    leaves it out, and what leases cost is in all of them.
    """
    return round(median(itl_ratios(ours, without)), 3)


def _ratio(own: float | None, base: float | None) -> float:
    return round(own / base, 3) if own and base else float("inf")
