"""Runs a scenario: its groups one after the other, or each in a process of its own, with the same answer.

The random choices of a group come from the seed and its number, so neither the number of processes nor their speed
changes a figure.
"""

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import reduce
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final

from .fleet import Fleet

if TYPE_CHECKING:
    from .results import Recorder, Results
    from .scenario import Scenario

_LOOK_S: Final = 0.5
"""How often progress is told where other processes make it."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(scenario: "Scenario", *, num_processes: int = 1, on_progress: Callable[[int], None] | None = None) -> "Results":
    """Simulate a scenario.

    Args:
        scenario: the fleet and its load.
        num_processes: most processes beside each other, one a group. With more than one, the caller's program must
            be importable without running (`if __name__ == "__main__"`), as for all of `multiprocessing`.
        on_progress: told the number of sessions that have begun, now and then.
    """
    tell = on_progress or (lambda _: None)
    num_processes = min(num_processes, scenario.groups)
    if num_processes > 1:
        seen = _run_beside(scenario, num_processes, tell)
    else:
        seen = [run_group(scenario, group, tell) for group in range(scenario.groups)]
    return reduce(_together, seen).results()


def run_group(scenario: "Scenario", group: int, on_progress: Callable[[int], None]) -> "Recorder":
    """Simulate one group of a scenario's fleet; return what was seen."""
    rate_per_s = scenario.rate_per_s()
    with _no_collector():
        return Fleet(scenario.config(), group).run(
            scenario.load(group),
            numbers=scenario.numbers(group),
            last_start_s=None if rate_per_s is None else scenario.num_sessions / rate_per_s,
            on_progress=on_progress,
        )


def _together(one: "Recorder", two: "Recorder") -> "Recorder":
    one.add_group(two)
    return one


@contextmanager
def _no_collector() -> Iterator[None]:
    """Leave cycles alone: a run makes none, and looking for them among millions of planned turns takes time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -------------------------------------------------------------------- processes

_begun: Any = None
"""In a process of a pool: how many sessions each group has begun, shared with the caller."""


def _run_beside(scenario: "Scenario", num_processes: int, tell: Callable[[int], None]) -> "list[Recorder]":
    context = multiprocessing.get_context("spawn")  # forking a program that has threads is not safe
    begun = context.Array("q", scenario.groups, lock=False)
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_share, initargs=(begun,)) as pool:
        futures = [pool.submit(_run_one, scenario, group) for group in range(scenario.groups)]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            tell(max(begun))
            for future in done:
                future.result()
    return [future.result() for future in futures]


def _share(begun: Any) -> None:
    global _begun  # noqa: PLW0603 (what a pool's initializer is for)
    _begun = begun
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Do not run on for minutes where whoever asked was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_one(scenario: "Scenario", group: int) -> "Recorder":
    def note(number: int) -> None:
        _begun[group] = number

    return run_group(scenario, group, note)
