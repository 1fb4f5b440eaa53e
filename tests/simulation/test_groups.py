"""A fleet in groups: what is merged, that nothing depends on the cores, and that it answers as one fleet does."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from server_ext.simulation.clock import Clock
from server_ext.simulation.fleet import Fleet
from server_ext.simulation.run import run
from server_ext.simulation.scenario import Scenario
from server_ext.traffic import SMALL

from .fleets import RATES, config, results, session, turn

ROOT = Path(__file__).resolve().parents[2]
BASE = Scenario(
    limits=None,
    rates=replace(RATES, pool_tokens=20_000),
    workload=SMALL,
    prefill=6,
    decode=6,
    sessions=90,
    concurrent=30,
    ttl=5,
    chunk=50,
    route="auto",
    seed=1,
)


def test_groups_answer_alike_whatever_the_cores():
    """One process, two and more than there are groups: the same figures, bit by bit."""
    three = replace(BASE, groups=3)
    alone = run(three)
    assert alone == run(three, num_processes=2)
    assert alone == run(three, num_processes=8)


def test_every_session_belongs_to_one_group_which_has_its_home():
    """Together the groups have all sessions, each as it is in the whole fleet, and no group has one of another's."""
    five = replace(BASE, groups=5)
    whole = dict(zip(BASE.numbers(), BASE.load(), strict=True))
    parts = [dict(zip(five.numbers(group), five.load(group), strict=True)) for group in range(5)]
    assert sum(len(part) for part in parts) == len(whole) == 90
    assert {number: one for part in parts for number, one in part.items()} == whole
    assert sorted(home for group in range(5) for home in five.config().homes(group)) == list(range(6))


def test_recorded_sessions_keep_their_starts_in_groups():
    """Drawn or as logged, a session is the same one in its group as in the whole fleet."""
    recorded = tuple(session(turn(100 + n), start=n) for n in range(20))
    for concurrent in (10.0, None):
        base = replace(BASE, workload=recorded, sessions=None, concurrent=concurrent)
        two = replace(base, groups=2)
        whole = dict(zip(base.numbers(), base.load(), strict=True))
        parts = {n: one for group in (0, 1) for n, one in zip(two.numbers(group), two.load(group), strict=True)}
        assert parts == whole


@pytest.mark.parametrize("last_start_s", [None, 40.0])
def test_merged_figures_are_those_of_one_fleet(last_start_s):
    """Where turns never meet at a P, two groups say what one fleet does: counts, percentiles, shares, leases, load."""
    whole = config(num_prefill=2, num_decode=2, route="local")
    halves = config(num_prefill=2, num_decode=2, route="local", num_groups=2)
    plans = [session(turn(900 + 10 * n), *[turn(100, gap=3.0)] * 4, start=2.0 * n) for n in range(24)]
    expected = Fleet(whole).run(iter(plans), last_start_s=last_start_s).results()
    seen = []
    for group in (0, 1):
        numbers = [n for n in range(24) if halves.home(n) in halves.homes(group)]
        ours = (plans[n] for n in numbers)
        seen.append(Fleet(halves, group).run(ours, numbers=numbers, last_start_s=last_start_s))
    seen[0].add_group(seen[1])
    found = seen[0].results()
    assert min(len(list(halves.homes(group))) for group in (0, 1)) == 1
    for name, value in expected.to_json().items():
        assert getattr(found, name) == (pytest.approx(value) if isinstance(value, float | dict) else value), name


def test_a_fleet_in_groups_answers_as_one_fleet():
    """Where there are many P to choose from anyway: shares within three points, the median within a tenth.

    Two points of them are P's own cache: one of twelve P has a session's last prompt twice as often as one of 24.
    """
    fleet = replace(BASE, prefill=24, decode=24, sessions=300, concurrent=100, route="fetch")
    one, two = run(fleet), run(replace(fleet, groups=2))
    assert two.num_turns == one.num_turns
    assert two.later_ttft_s["p50"] == pytest.approx(one.later_ttft_s["p50"], rel=0.1)
    assert two.utilisation == pytest.approx(one.utilisation, abs=0.02)
    for outcome, share in one.outcomes.items():
        assert two.outcomes.get(outcome, 0) == pytest.approx(share, abs=0.03)


def test_more_groups_than_engines_are_refused():
    """Each group needs an engine of each kind; the error says how many groups there can be."""
    with pytest.raises(ValueError, match=r"num_groups is 7; give at most 6"):
        replace(BASE, groups=7)
    with pytest.raises(ValueError, match=r"give at most 2"):
        replace(BASE, prefill=2, groups=3)
    assert run(replace(BASE, prefill=0, sessions=10, groups=6)).outcomes.keys() <= {"local", "recomputed"}


def test_progress_is_told_by_every_process():
    """Whoever watches hears of the sessions that have begun."""
    told = []
    run(replace(BASE, groups=2), num_processes=2, on_progress=told.append)
    assert told
    assert all(0 <= number < 90 for number in told)


def test_no_process_outlives_the_one_that_asked(tmp_path):
    """Killed, it leaves none behind that would compute for nobody: the last end of its output closes."""
    program = tmp_path / "endless.py"
    program.write_text(
        "from dataclasses import replace\n"
        "from server_ext.simulation.run import run\n"
        "from tests.simulation.test_groups import BASE\n"
        "if __name__ == '__main__':\n"
        "    endless = replace(BASE, sessions=1_000_000, groups=2)\n"
        "    run(endless, num_processes=2, on_progress=lambda number: print(number, flush=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asking = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment)
    for line in asking.stdout:
        if int(line):
            break
    asking.kill()
    asking.communicate(timeout=60)


def test_a_lease_counts_until_it_ends_not_until_somebody_looks():
    """A long answer of another session ends behind it, which must neither lengthen its time nor count any twice."""
    first = session(turn(1_000, 10))
    busy = session(turn(10, 400), turn(10, 10, gap=5.0), start=10)
    alone = [results(one, ttl=20).pinned_byte_s for one in (first, busy)]
    both = results(first, busy, ttl=20)
    assert both.pinned_byte_s == pytest.approx(sum(alone))


def test_the_clock_calls_in_order_of_time_and_then_of_asking():
    """Also what is asked for on the way, and at the same moment."""
    clock, called = Clock(), []

    def note(name):
        called.append((clock.now_s, name))
        if name == "b":
            clock.after(0.0, note, "last of 1")

    for delay_s, name in ((2.0, "c"), (1.0, "b"), (1.0, "b2"), (0.0, "a")):
        clock.after(delay_s, note, name)
    clock.run()
    assert called == [(0.0, "a"), (1.0, "b"), (1.0, "b2"), (1.0, "last of 1"), (2.0, "c")]
