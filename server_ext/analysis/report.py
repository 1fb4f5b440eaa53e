"""Runs an analysis, and holds its result: the one object that the text, the JSON and the page are made from."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .formats import FORMATS, Parser
from .limits import Limits
from .misses import CAUSES, Miss
from .problems import Problems
from .questions import (
    Holding,
    LinkAnswer,
    Reuse,
    ask_holding,
    ask_link,
    ask_reuse,
)
from .requests import Request
from .sessions import Sessions
from .ttft import TtftAnswer, ask_ttft
from .turns import Names, Spool
from .verdict import Verdict, judge

SCHEMA: Final = 1
"""Of the JSON; a change of meaning bumps it."""
NOT_MODELLED: Final = (
    "queueing and batching: times are those of idle engines; a loaded P gains more, a full D holds less",
    "the way of the new KV from P to D (the same with and without reuse), chunked prefill, routers",
    "blocks that sessions share (a common system prompt counts in each), and what ended leases leave in D's cache",
    "appending on D (outcome `local`), which needs no transfer but slows D's other requests",
    "leases renewed during tool calls (`session.hold()`): they live longer than the settings say",
)
DEFAULT_BUDGETS: Final = (0.1, 0.25, 0.5, 0.75, 1.0)
DEFAULT_TTLS_S: Final = (15.0, 60.0, 120.0, 300.0, 480.0, 900.0)
_MAX_EXAMPLES: Final = 12
_MAX_ROWS: Final = 10_000
"""For questions (a) and (b); of more turns, every n-th is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to assume."""

    limits: Limits
    budgets: tuple[float, ...] = DEFAULT_BUDGETS
    ttls_s: tuple[float, ...] = DEFAULT_TTLS_S
    num_nodes: int | None = None
    max_replayed_turns: int = 20_000
    show_content: bool = False


@dataclass(slots=True)
class Misses:
    """Misses by cause, and the costliest of them."""

    counts: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    worst: list[tuple[int, int, Miss]] = field(default_factory=list)

    def add(self, miss: Miss) -> None:
        """Count a miss."""
        self.counts[miss.cause] += 1
        self.lost_tokens[miss.cause] += miss.lost_tokens
        heapq.heappush(self.worst, (miss.lost_tokens, -self.counts.total(), miss))
        if len(self.worst) > _MAX_EXAMPLES:
            heapq.heappop(self.worst)

    def to_json(self) -> dict[str, Any]:
        """Return causes and examples, the costliest first."""
        causes = [
            {
                "cause": cause,
                "reason": CAUSES[cause].reason,
                "count": self.counts[cause],
                "lost_tokens": lost,
                "meaning": CAUSES[cause].meaning,
                "fix": CAUSES[cause].fix,
            }
            for cause, lost in self.lost_tokens.most_common()
        ]
        return {"causes": causes, "examples": [miss.to_json() for _, _, miss in sorted(self.worst, reverse=True)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that an analysis found."""

    options: Options
    formats: dict[str, int]
    problems: Problems
    num_by_prefix: int
    reuse: Reuse
    link: LinkAnswer
    holding: Holding
    ttft: TtftAnswer
    verdict: Verdict
    misses: Misses

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object: units in the names, no content unless asked for."""
        limits = self.options.limits
        holding = {name: getattr(self.holding, name) for name in self.holding.__slots__}
        holding["grid"] = [cell.to_json() for cell in self.holding.grid]
        holding["best"] = self.holding.best and self.holding.best.to_json()
        return {
            "schema": SCHEMA,
            "input": {
                "formats": self.formats,
                "num_sessions": self.reuse.num_sessions,
                "num_sessions_by_prefix": self.num_by_prefix,
                "problems": self.problems.to_json(),
            },
            "assumptions": {
                "model": asdict(limits.model),
                "gpu": asdict(limits.gpu),
                "num_gpus_per_engine": limits.num_gpus,
                "link": asdict(limits.link),
                "fixed_s": limits.fixed_s,
                "efficiency": limits.efficiency,
                "pool_bytes": limits.pool_bytes,
                "not_modelled": list(NOT_MODELLED),
            },
            "reuse": asdict(self.reuse),
            "link": asdict(self.link),
            "holding": holding,
            "ttft": asdict(self.ttft),
            "misses": self.misses.to_json(),
            "verdict": self.verdict.to_json(),
        }


class NothingToAnalyze(ValueError):
    """There is no request in the input; the text says what was there instead."""


def analyze(
    sources: Iterable[Iterable[tuple[str, bytes]]],
    problems: Problems,
    options: Options,
    *,
    on_cell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Read all sources and answer the questions.

    Args:
        sources: the lines of each, with their places, as `sources` reads them.
        problems: as given to the reader; more are counted here.
        options: what to assume.
        on_cell: told how many replays of how many are done.

    Raises:
        NothingToAnalyze: there is no request in it.
    """
    parser, misses, limits = Parser(problems), Misses(), options.limits
    with closing(Spool()) as spool, closing(Names()) as names:
        num_by_prefix = _spool_turns(_requests(parser, sources), problems, options, spool, names, misses)
        if not spool.num_rows:
            found = ", ".join(f"{item['count']} x {item['name']}" for item in problems.to_json()) or "nothing at all"
            msg = f"no request in the input (found: {found}): give one of {', '.join(FORMATS.values())}"
            raise NothingToAnalyze(msg)
        # Percentiles and shares of more turns than these are no different.
        some = spool.sample(_MAX_ROWS)
        holding, replayed = ask_holding(
            spool,
            limits,
            budgets=options.budgets,
            ttls_s=options.ttls_s,
            num_nodes=options.num_nodes,
            max_turns=options.max_replayed_turns,
            on_cell=on_cell,
        )
        if holding.best is None or holding.best.held_by_row is None:
            replayed, held = some, some["shared"]
        else:
            held = holding.best.held_by_row
        ttft, savings = ask_ttft(replayed, held, limits)
        verdict = judge(savings, holding, limits, num_without_content=problems.counts["no_content"])
        found_names = names.find([one["number"] for one in verdict.sessions])
        for one in verdict.sessions:
            one["session"] = found_names[one["number"]]
        return Report(
            options=options,
            formats=dict(parser.counts),
            problems=problems,
            num_by_prefix=num_by_prefix,
            reuse=ask_reuse(some, spool.column("session")),
            link=ask_link(some, limits),
            holding=holding,
            ttft=ttft,
            verdict=verdict,
            misses=misses,
        )


def _spool_turns(
    requests: Iterable[Request], problems: Problems, options: Options, spool: Spool, names: Names, misses: Misses
) -> int:
    """Make turns of requests, and spool them; return how many sessions were told by their prefix."""
    limits = options.limits
    with closing(
        Sessions(problems, decode_s_per_token=limits.decode_s_per_token, keep_texts=options.show_content)
    ) as sessions:
        for key, turn, miss in sessions.turns(requests):
            if turn.prompt_tokens > limits.model.max_context_tokens:
                problems.add("over_context", f"{key}, turn {turn.turn}")
            if turn.turn == 1:
                names.append(key)
            spool.append(turn)
            if miss is not None:
                misses.add(miss)
        return sessions.num_by_prefix


def _requests(parser: Parser, sources: Iterable[Iterable[tuple[str, bytes]]]) -> Iterator[Request]:
    for source in sources:
        yield from parser.parse(source)
