"""From the route that is asked for to the way that a turn goes, through a home's operations."""

import pytest

from server_ext.core.rates import LearnedRates
from server_ext.core.settings import HomeSettings

from .fakes import FakePool, make_home, packed, some_ids
from .test_home import KEY, begin, error_code, run_turn, settle

P = "http://p"
SHOWN = {"prompt_tokens": 20, "reused_tokens": 0, "fetched_tokens": 13, "prefill_s": 1.1, "fetch_s": 0.1}
SHOWN |= {"handover_s": 0.1, "pair": P}


def held_home(rates=None, **settings):
    """Return a home where Alice's lease holds 13 tokens, and nothing is too short to be fetched."""
    pool = FakePool()
    home = make_home(pool, rates=rates, **{"min_fetch_tokens": 1} | settings)
    run_turn(home, pool, turn=1, ids=some_ids(14))
    return home


def second(home, route, **changes):
    """Begin Alice's second turn on a route."""
    return begin(home, turn=2, ids=some_ids(20), now_s=30, route=route, **changes)


def slow_to(way):
    """Return rates under which one way is by far the fastest, and all others are slow."""
    rates = LearnedRates()
    for i in range(3):
        rates.observe_prefill(10.0 if way == "local" else 0.1, 7, num_cached=13)
        rates.observe_append(0.1 if way == "local" else 10.0, 7, num_cached=13)
        rates.observe_fetch(0.01 if way == "fetch" else 30.0, i, pair=P)
        rates.observe_handover(0.01, i, pair=P)
        if way == "fetch":  # computing the whole prompt is what it spares
            rates.observe_prefill(20.0, 20)
    return rates


@pytest.mark.parametrize("way", ["local", "fetch", "prefill"])
def test_auto_takes_the_fastest_way(way):
    """The turn goes that way, a ticket is opened only for a fetch, and the choice is told with its seconds."""
    begun = second(held_home(slow_to(way)), "auto")
    assert begun["route"] == way
    assert (begun["ticket"] is not None) == (way == "fetch")
    choice = begun["choice"]
    assert choice["by"] == "cheapest"
    assert choice[way] == min(choice[name] for name in ("local", "fetch", "prefill"))


def test_auto_without_a_lease_has_no_fetch_to_choose():
    """On a first turn P or D computes all; a fetch is no possible way."""
    home = make_home(FakePool())
    home.handle("load", {**KEY, "turn": 1}, now_s=0)
    begun = begin(home, turn=1, ids=some_ids(10), route="auto")
    assert begun["route"] in {"local", "prefill"}
    assert begun["choice"]["fetch"] is None
    assert None not in (begun["choice"]["local"], begun["choice"]["prefill"])


def test_auto_that_gets_no_ticket_chooses_again():
    """Where all tickets are taken the second-best way is taken, and the refusal is told."""
    pool = FakePool()
    home = make_home(pool, rates=slow_to("fetch"), min_fetch_tokens=1, max_request_blocks=pool.num_total_blocks())
    run_turn(home, pool, turn=1, ids=some_ids(14))
    begun = second(home, "auto")
    assert (begun["ticket"], begun["ticket_reason"]) == (None, "over_budget")
    assert begun["route"] != "fetch"
    assert begun["choice"]["fetch"] is None


@pytest.mark.parametrize("route", ["fetch", "local", "prefill", "recompute"])
def test_a_given_route_is_no_choice(route):
    """It is taken however slow it is."""
    begun = second(held_home(slow_to("local" if route != "local" else "fetch")), route)
    assert (begun["route"], begun["choice"]) == (route, None)


def test_without_prefill_engines_all_is_local():
    """No route leads to a P that is not there, and no ticket is opened for it."""
    for route in ("auto", "fetch", "prefill", "recompute"):
        begun = second(held_home(), route, prefill_urls=[])
        assert (begun["route"], begun["ticket"]) == ("local", None)


def test_settled_turns_teach_the_home():
    """What turns have shown is what the next ones are chosen by; abandoned ones show nothing."""
    home = held_home()
    before = second(home, "auto")
    home.handle("abandon", {"nonce": before["nonce"], "return_ticket": True}, now_s=101)
    for turn in range(2, 5):
        begun = begin(home, turn=turn, ids=some_ids(20), now_s=turn * 100, route="prefill")
        shown = SHOWN | {"fetched_tokens": 0, "fetch_s": None, "prefill_s": 50.0}
        assert "error" not in settle(home, begun["nonce"], some_ids(20), now_s=turn * 100, observed=shown)
    after = begin(home, turn=5, ids=some_ids(20), now_s=1000, route="auto")
    assert after["choice"]["prefill"] > 20 > before["choice"]["prefill"]


def test_the_engines_streams_are_asked_for():
    """With a guard of 0 nothing is appended on D while anything generates there."""
    home = held_home(slow_to("local"), itl_guard=0)
    assert second(home, "auto")["route"] == "local"
    pool = FakePool()
    busy = make_home(pool, rates=slow_to("local"), min_fetch_tokens=1, itl_guard=0, count_running=lambda: 3)
    run_turn(busy, pool, turn=1, ids=some_ids(14))
    begun = second(busy, "auto")
    assert begun["route"] != "local"
    assert begun["choice"]["by"] == "guard"


@pytest.mark.parametrize(
    "observed",
    [
        7,
        SHOWN | {"prompt_tokens": -1},
        SHOWN | {"prefill_s": "long"},
        SHOWN | {"pair": 3},
        SHOWN | {"failed_pairs": "p"},
        SHOWN | {"is_read_failed": 1},
    ],
)
def test_what_a_turn_has_shown_is_checked(observed):
    """A malformed observation is refused at the door, and the turn is still open."""
    home = held_home()
    begun = second(home, "fetch")
    assert error_code(settle(home, begun["nonce"], some_ids(20), observed=observed)) == "invalid_request"
    assert "error" not in settle(home, begun["nonce"], some_ids(20), now_s=100, observed=SHOWN)


def test_an_unknown_route_is_refused():
    """The home takes the routes of the wire only."""
    home = held_home()
    arg = {**KEY, "turn": 2, "prompt_ids": packed(some_ids(3)), "fingerprint": "f", "route": "scenic"}
    assert error_code(home.handle("begin", arg, now_s=1)) == "invalid_request"


def test_the_guard_is_a_setting():
    """A share of 0 or more, and `auto` is the default route."""
    assert HomeSettings().default_route == "auto"
    assert HomeSettings.from_config({"itl_guard": 0}).itl_guard == 0
    for bad in (-0.1, float("nan"), "0.1", True):
        with pytest.raises(ValueError, match="itl_guard"):
            HomeSettings.from_config({"itl_guard": bad})
