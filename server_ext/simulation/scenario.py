"""One question to the simulator, a grid of them, and what to conclude from their answers.

`run.run` answers one `Scenario`; `grid` makes one for each combination of values; `recommend` reads the answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bidikv_sdk.wire import ROUTES, Route
from server_ext.analysis.hardware import find_link
from server_ext.analysis.limits import Limits
from server_ext.analysis.memory import make_settings, settings_to_write
from server_ext.traffic import PlannedSession, Workload, generate

from .config import FleetConfig
from .rates import FleetRates, from_limits

if TYPE_CHECKING:
    from .results import Results

_LEAST_SESSIONS: Final = 200
_LIVES: Final = 4
"""A run lasts as long as so many lives of a session: the first fills the fleet."""
_MAX_CONCURRENT: Final = 1e9
_SAMPLE: Final = 300
"""Sessions that tell how long one lives."""
NEARLY_BEST: Final = 1.1
"""Without a target, a 99th percentile up to so many times the best one will do."""
KNEE: Final = 2.0
"""Without a target, scaling ends where the 99th percentile is so many times that of the lightest load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet under a load.

    Raises:
        ValueError: a value makes no sense; the text names it.
    """

    limits: Limits | None
    """The hardware; None where `rates` were measured."""
    rates: FleetRates
    workload: Workload | tuple[PlannedSession, ...]
    """Made up, or recorded."""
    prefill: int = 1
    decode: int = 1
    sessions: int | None = None
    """None: those that were recorded where they begin as recorded, else four for each that is in progress."""
    concurrent: float | None = 20.0
    """Sessions that are in progress at a time, on average; None: all begin when they were recorded."""
    budget: float = 0.5
    ttl: float = 60.0
    route: Route = "fetch"
    link: str = ""
    """Another link than that of `limits`."""
    hold: bool = False
    prefill_cache: bool = True
    chunk: int = 256
    seed: int = 0
    groups: int = 1
    """Parts of the fleet that have nothing to do with each other; each may run on a core of its own."""

    def __post_init__(self) -> None:
        if (self.sessions is not None and self.sessions < 1) or (
            self.concurrent is not None and not 0 < self.concurrent < _MAX_CONCURRENT
        ):
            msg = (
                f"{self.sessions} sessions, {self.concurrent} at a time: give 1 or more, and a number above 0, below "
                f"{_MAX_CONCURRENT:g}"
            )
            raise ValueError(msg)
        if self.route not in ROUTES:
            msg = f"route is {self.route!r}: use one of {', '.join(ROUTES)}"
            raise ValueError(msg)
        if self.link and self.limits is None:
            msg = f"link {self.link!r} cannot be told with measured rates: they have a link of their own"
            raise ValueError(msg)
        self.config()

    @property
    def num_sessions(self) -> int:
        """Sessions of the run."""
        if self.sessions is not None:
            return self.sessions
        if self.concurrent is None:
            return len(self.workload) if isinstance(self.workload, tuple) else _LEAST_SESSIONS
        return max(_LEAST_SESSIONS, math.ceil(_LIVES * self.concurrent))

    def config(self) -> FleetConfig:
        """Return the fleet."""
        rates = self.rates
        if self.link and self.limits is not None:
            rates = from_limits(replace(self.limits, link=find_link(self.link)))
        return FleetConfig(
            num_prefill=self.prefill,
            num_decode=self.decode,
            rates=rates,
            settings=make_settings(self.budget, self.ttl),
            route=self.route,
            has_prefill_cache=self.prefill_cache,
            holds_tools=self.hold,
            chunk_tokens=self.chunk,
            seed=self.seed,
            num_groups=self.groups,
        )

    def rate_per_s(self) -> float | None:
        """Return how many sessions begin per second; None where all begin when they were recorded."""
        return None if self.concurrent is None else self.concurrent / self.mean_life_s()

    def mean_life_s(self) -> float:
        """Return how long a session is in progress on an idle fleet, its prefills aside."""
        if isinstance(self.workload, Workload):
            return _mean_life_s(_sample(self.workload, self.seed), self.rates.decode_step_s)
        return _mean_life_s(self.workload, self.rates.decode_step_s)

    def numbers(self, group: int = 0) -> Iterator[int]:
        """Yield which sessions belong to a group, by their number from 0: those whose home does."""
        if self.groups == 1:
            yield from range(self.num_sessions)
            return
        config = self.config()
        homes = config.homes(group)
        yield from (number for number in range(self.num_sessions) if config.home(number) in homes)

    def load(self, group: int = 0) -> Iterator[PlannedSession]:
        """Yield the sessions of a group in the order of their start."""
        rate_per_s, wanted = self.rate_per_s(), None if self.groups == 1 else set(self.numbers(group))
        if isinstance(self.workload, Workload):
            return generate(self.workload, self.num_sessions, seed=self.seed, rate_per_s=rate_per_s, wanted=wanted)
        sessions: Iterator[PlannedSession] = islice(self.workload, self.num_sessions)
        if rate_per_s is not None:
            sessions = _drawn(self.workload, self.num_sessions, self.seed, rate_per_s)
        return (one for number, one in enumerate(sessions) if wanted is None or number in wanted)


@lru_cache(maxsize=1)
def _sample(workload: Workload, seed: int) -> tuple[PlannedSession, ...]:
    return tuple(generate(workload, _SAMPLE, seed=seed, rate_per_s=None))


def _mean_life_s(sample: Sequence[PlannedSession], decode_step_s: float) -> float:
    turns = [turn for session in sample for turn in session.turns]
    return sum(turn.gap_s + turn.output_tokens * decode_step_s for turn in turns) / len(sample)


def _drawn(
    recorded: tuple[PlannedSession, ...], num_sessions: int, seed: int, rate_per_s: float
) -> Iterator[PlannedSession]:
    """Yield recorded sessions at random, beginning at random."""
    random = np.random.default_rng(seed)
    start_s = 0.0
    for _ in range(num_sessions):
        start_s += float(random.exponential(1 / rate_per_s))
        yield replace(recorded[int(random.integers(len(recorded)))], start_s=start_s)


# -------------------------------------------------------------------- grids

AXES: Final = ("prefill", "decode", "concurrent", "budget", "ttl", "route", "link", "hold", "prefill_cache")
"""What a grid may vary."""
_FLAGS: Final = {"yes": True, "no": False, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Cell:
    """An answer of a grid."""

    values: Mapping[str, Any]
    """Of the axes."""
    scenario: Scenario
    results: "Results"

    @property
    def num_engines(self) -> int:
        """Of both kinds."""
        return self.scenario.prefill + self.scenario.decode

    @property
    def p99_s(self) -> float:
        """Of the time to the first token of later turns; infinite where there is none, or a turn was refused."""
        found = self.results.later_ttft_s
        return float("inf") if found is None or self.results.refused else found["p99"]

    def is_within(self, limit_s: float) -> bool:
        """Return whether all turns were served, 99 % of the later ones within a limit, which may be infinite."""
        return self.p99_s <= limit_s and self.p99_s < float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        return {"values": dict(self.values), "results": self.results.to_json()}


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each axis of texts such as `decode=1,2,4`.

    Raises:
        ValueError: a text is not of this form; it is named, with the fix.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in AXES or not values:
            msg = f"--sweep {text!r}: write NAME=VALUE,VALUE with a name of {', '.join(AXES)}"
            raise ValueError(msg)
        try:
            axes[name] = [_value(name, value.strip()) for value in values.split(",")]
        except (ValueError, KeyError) as error:
            msg = f"--sweep {text!r}: {values!r} is not a list of values of {name}"
            raise ValueError(msg) from error
    return axes


def _value(name: str, text: str) -> Any:
    if name in {"hold", "prefill_cache"}:
        return _FLAGS[text]
    if name in {"prefill", "decode"}:
        return int(text)
    if name in {"route", "link"}:
        return text
    return float(text)


def grid(base: Scenario, axes: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Scenario]]:
    """Return a scenario for each combination of values, in their order.

    Raises:
        ValueError: a combination makes no sense.
    """
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [(values, replace(base, **values)) for values in combinations]


# -------------------------------------------------------------------- what to conclude


@dataclass(frozen=True, slots=True)
class Advice:
    """What a grid says."""

    best: Cell | None
    """The fewest engines, then the shortest and smallest leases, of those that do; None where none does."""
    target_s: float
    """What their 99th percentile was held against; infinite where none was given and no answer has one."""
    is_given: bool
    """Whether the target was given, or is what the grid reached."""
    scaling: list[str]
    """Where it stops to scale, one line per fleet, where loads were varied."""

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a JSON object."""
        return {
            "target_p99_s": self.target_s if math.isfinite(self.target_s) else None,
            "is_target_given": self.is_given,
            "best": None if self.best is None else dict(self.best.values),
            "settings": None if self.best is None else settings_of(self.best.scenario),
            "scaling": self.scaling,
        }


def settings_of(scenario: Scenario) -> dict[str, Any]:
    """Return what to set under `kv_connector_extra_config.bidikv`."""
    return settings_to_write(scenario.budget, scenario.ttl) | {"default_route": scenario.route}


def recommend(cells: Sequence[Cell], target_s: float | None) -> Advice:
    """Choose among the answers of a grid.

    Args:
        cells: at least one.
        target_s: that the 99th percentile of later turns must not exceed; None: nearly the best of the grid will do.
    """
    heaviest = max(cell.scenario.concurrent or 0.0 for cell in cells)
    # A fleet is judged by the heaviest load that was asked for.
    judged = [cell for cell in cells if (cell.scenario.concurrent or 0.0) == heaviest]
    limit_s = target_s if target_s is not None else NEARLY_BEST * min(cell.p99_s for cell in judged)
    good = [cell for cell in judged if cell.is_within(limit_s)]
    best = min(good, key=lambda cell: (cell.num_engines, cell.scenario.ttl, cell.scenario.budget), default=None)
    return Advice(best, limit_s, target_s is not None, list(_scaling(cells, target_s)))


def _scaling(cells: Sequence[Cell], target_s: float | None) -> Iterator[str]:
    """Yield how far each fleet carries, where more than one load was asked for."""
    fleets: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        fleets.setdefault(tuple((k, v) for k, v in cell.values.items() if k != "concurrent"), []).append(cell)
    for key, loads in fleets.items():
        if len(loads) == 1:
            continue
        loads.sort(key=lambda cell: cell.scenario.concurrent or 0.0)
        limit_s = target_s if target_s is not None else KNEE * loads[0].p99_s
        name = ", ".join(f"{k} {v}" for k, v in key) or f"{loads[0].scenario.prefill}P + {loads[0].scenario.decode}D"
        first_bad = next((n for n, cell in enumerate(loads) if not cell.is_within(limit_s)), None)
        if first_bad is None:
            yield f"{name}: carries {loads[-1].scenario.concurrent:g} sessions at a time and more"
        elif loads[first_bad].results.later_ttft_s is None and not loads[first_bad].results.refused:
            yield f"{name}: no later turn was judged, so nothing can be said"
        else:
            last = f"{loads[first_bad - 1].scenario.concurrent:g} sessions" if first_bad else "less than the least load"
            yield f"{name}: carries {last}; beyond, {_limit(loads[first_bad].results)}"


def _limit(results: "Results") -> str:
    """Say why a fleet does not carry a load."""
    if results.refused:
        why = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in results.refused.items())
        return f"turns could not be served ({why})"
    parts = {"prefill engines": "prefill", "decode engines": "decode", "the busiest link port": "links_max"}
    name = max(parts, key=lambda part: results.utilisation[parts[part]])
    lost = sum(results.reasons.get(reason, 0.0) for reason in ("lease_expired", "lease_revoked", "over_budget"))
    return (
        f"{name} are busiest ({results.utilisation[parts[name]]:.0%}), and {lost:.0%} of the turns found less than all"
    )


def names_of(scenario: Scenario) -> dict[str, Any]:
    """Return all plain values of a scenario, for the report."""
    skipped = {"limits", "rates", "workload"}
    return {one.name: getattr(scenario, one.name) for one in fields(scenario) if one.name not in skipped}
