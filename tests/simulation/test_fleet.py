"""The simulator against answers that can be worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from server_ext.analysis.hardware import find_gpu, find_link, find_model
from server_ext.analysis.limits import Limits
from server_ext.simulation.config import FleetConfig
from server_ext.simulation.engines import PrefillEngine
from server_ext.simulation.rates import from_limits
from server_ext.traffic import AGENT, SMALL, generate

from .fleets import RATES, config, results, session, turn


def prefill_s(num_tokens, num_present=0):
    """What P takes, by the formula of the limit model."""
    new = num_tokens - num_present
    return 0.1 + 0.001 * (new + (num_tokens**2 - num_present**2) / 10_000)


# ---------------------------------------------------------------- nothing waits


def test_a_first_turn_alone_takes_control_prefill_handover_and_one_step():
    """1,000 tokens are computed on P, handed over whole, and the first token is D's first step."""
    found = results(session(turn(1_000)))
    assert found.first_ttft_s["p50"] == pytest.approx(0.01 + prefill_s(1_000) + 0.03 + 0.2 + 0.05)
    assert found.tokens == {"prompt": 1_000, "reused": 0, "fetched": 0, "computed": 1_000}
    assert found.later_ttft_s is None


def test_a_later_turn_fetches_what_the_lease_holds():
    """1,010 tokens come from D, 100 are computed behind them, and only these go back."""
    found = results(session(turn(1_000), turn(100, gap=5)))
    fetch_s, back_s = 0.02 + 0.0001 * 1_010, 0.03 + 0.0002 * 100
    assert found.later_ttft_s["p50"] == pytest.approx(0.01 + fetch_s + prefill_s(1_110, 1_010) + back_s + 0.05)
    assert found.outcomes == {"fetched": 1}
    assert found.reasons == {"cheapest": 1}
    assert found.tokens == {"prompt": 2_110, "reused": 0, "fetched": 1_010, "computed": 1_100}


def test_one_session_on_idle_hardware_takes_what_the_limit_model_says():
    """With constants of real hardware, a turn is the limit model's fetch and compute, and what that leaves out."""
    limits = Limits(find_model("llama-3.1-8b"), find_gpu("h100"), find_link("400g"))
    rates = from_limits(limits)
    found = results(session(turn(32_000), turn(2_000, gap=1)), rates=rates)
    rest = rates.control_s + limits.fetch_s(2_000) + rates.step_s(1, 34_010 + 5)
    expected = limits.fetch_s(32_010) + limits.compute_s(34_010, 32_010)
    assert found.later_ttft_s["p50"] == pytest.approx(expected + rest, rel=1e-5)
    first = limits.compute_s(32_000) + limits.fetch_s(32_000) + rates.control_s + rates.step_s(1, 32_005)
    assert found.first_ttft_s["p50"] == pytest.approx(first, rel=1e-5)


def test_a_recomputed_turn_is_computed_and_handed_over_whole():
    """The route `recompute` uses nothing of what is held."""
    found = results(session(turn(1_000), turn(100, gap=5)), route="recompute", has_prefill_cache=True)
    expected = 0.01 + prefill_s(1_110) + 0.03 + 0.0002 * 1_110 + 0.05
    assert found.later_ttft_s["p50"] == pytest.approx(expected)
    assert (found.outcomes, found.reasons) == ({"recomputed": 1}, {"forced": 1})


def test_the_prefill_cache_has_the_prompt_but_not_the_answer():
    """With P's own cache, `prefill` computes the last answer and the delta; `fetch` brings the answer from D."""
    two = session(turn(1_000, 100), turn(200, gap=5))
    found = results(two, route="prefill", has_prefill_cache=True)
    assert found.outcomes == {"prefilled": 1}
    assert found.tokens == {"prompt": 2_300, "reused": 1_000, "fetched": 0, "computed": 1_300}
    found = results(two, route="fetch", has_prefill_cache=True)
    assert found.tokens == {"prompt": 2_300, "reused": 1_000, "fetched": 100, "computed": 1_200}


def test_a_turn_that_is_appended_on_its_home_moves_nothing():
    """The route `local` has neither P nor a link in it; its last chunk makes the first token."""
    found = results(session(turn(1_000), turn(100, gap=5)), route="local")
    assert found.later_ttft_s["p50"] == pytest.approx(0.01 + prefill_s(1_110, 1_010))
    assert found.outcomes == {"local": 1}
    assert (found.utilisation["prefill"], found.utilisation["links_max"]) == (0, 0)


def test_without_prefill_engines_every_turn_is_computed_where_it_is_decoded():
    """A fleet of no P is one of aggregated engines, whatever the route."""
    found = results(session(turn(1_000), turn(100, gap=5)), num_prefill=0)
    assert found.outcomes == {"local": 1}


def test_a_home_that_chooses_finds_the_cheapest_way_of_an_idle_fleet():
    """Nothing decodes and links are slow, so the tail is appended; on a slow D beside nothing, as well."""
    turns = [turn(1_000), *(turn(100, gap=5) for _ in range(20))]
    found = results(session(*turns), route="auto", changes={"fetch_fixed_s": 1.0, "handover_fixed_s": 1.0})
    assert found.outcomes["local"] > 0.8
    forced = results(session(*turns), route="fetch", changes={"fetch_fixed_s": 1.0, "handover_fixed_s": 1.0})
    assert found.later_ttft_s["p50"] < 0.5 * forced.later_ttft_s["p50"]


def test_a_home_that_chooses_protects_what_decodes_there():
    """The same agent appends on an idle D, and goes over P for many of its turns where others decode at all times."""
    readers = [session(*(turn(100, 2_000, gap=0.1) for _ in range(10))) for _ in range(2)]
    agent = session(turn(8_000), *(turn(900, gap=1) for _ in range(40)), start=30)
    slow = {"pool_tokens": 400_000, "max_context_tokens": 200_000, "fetch_fixed_s": 0.5}
    alone = results(agent, route="auto", changes=slow)
    beside = results(*readers, agent, route="auto", changes=slow)
    assert alone.outcomes["local"] > 0.8
    assert beside.outcomes["fetched"] > 0.2


# ---------------------------------------------------------------- leases


def test_a_lease_that_ended_is_regained_while_nobody_took_its_blocks():
    """A gap longer than the lease's life costs nothing on an idle engine: the blocks are still in its prefix cache."""
    found = results(session(turn(1_000), turn(100, gap=61), turn(100, gap=59)), ttl=60)
    assert found.outcomes == {"fetched": 1}
    assert found.reasons == {"cheapest": 0.5, "lease_expired": 0.5}
    assert found.leases["expired"] == 2  # the last one too, for nobody ended the session


def test_a_lease_that_ended_is_lost_when_others_took_its_blocks():
    """What expired is the first that a request of another session overwrites."""
    other = session(turn(45_000), start=100)
    found = results(session(turn(30_000), turn(100, gap=1_000)), other, ttl=30)
    assert found.outcomes == {"recomputed": 1}
    assert found.reasons == {"lease_expired": 1}
    assert results(session(turn(30_000), turn(100, gap=1_000)), ttl=30).outcomes == {"fetched": 1}


def test_agents_that_hold_keep_their_lease_through_tool_calls_only():
    """A hold outlasts the tool, up to the server's limit; nobody holds while a human thinks."""
    long = [turn(1_000), turn(100, gap=300, tool=True), turn(100, gap=300)]
    found = results(session(*long), ttl=60, holds_tools=True)
    assert found.reasons == {"cheapest": 0.5, "lease_expired": 0.5}
    assert results(session(*long), ttl=60).reasons == {"lease_expired": 1}


def test_a_budget_clips_leases():
    """Leases of a tenth of the pool hold 5,000 of 10,010 tokens: half is fetched, half computed."""
    found = results(session(turn(10_000), turn(100, gap=1)), budget=0.1)
    assert found.reasons == {"over_budget": 1}
    assert found.tokens["fetched"] == 5_000
    assert found.leases["over_budget"] == 2


def test_requests_take_their_blocks_from_leases():
    """Two sessions of 30,000 tokens do not fit beside each other: the second's turn takes the first's lease."""
    found = results(session(turn(30_000), turn(100, gap=1_000)), session(turn(30_000), start=100), ttl=10_000)
    assert found.reasons == {"lease_revoked": 1}
    assert 0 < found.tokens["fetched"] < 30_010  # a lease gives way from its tail, by no more than is needed
    assert found.leases["clipped"] == 2  # and the first one's turn takes from the second's lease


def test_an_edited_history_is_fetched_up_to_the_edit():
    """Of 1,010 tokens the first 500 are as they were."""
    found = results(session(turn(1_000), turn(100, gap=1, kept=500)))
    assert found.tokens["fetched"] == 500
    assert found.reasons == {"messages_changed": 1}


def test_pinned_memory_is_told_per_token_that_was_not_computed():
    """1,010 tokens of 1,000 bytes for 50 s, and those of the last turn until the lease runs out."""
    found = results(session(turn(1_000), turn(100, gap=50)), ttl=100)
    assert found.pinned_byte_s == pytest.approx(1_010e3 * 50 + 1_120e3 * 100, rel=0.05)
    assert found.pinned_byte_s_per_avoided_token == pytest.approx(found.pinned_byte_s / 1_010)


def test_a_ticket_that_waits_too_long_is_not_used():
    """Behind a prompt that takes P longer than a ticket lives, a turn computes what it could have fetched."""
    found = results(
        session(turn(1_000), turn(100, gap=10)),
        session(turn(30_000), start=11),
        changes={"prefill_s_per_token": 0.003},
        ttl=900,
    )
    assert found.reasons == {"ticket_late": 1}
    assert found.outcomes == {"recomputed": 1}


# ---------------------------------------------------------------- what waits


def test_prompts_wait_for_each_other_on_one_prefill_engine():
    """Of two first turns at the same moment the second waits for all of the first."""
    free = {"handover_s_per_token": 0.0, "decode_s_per_sequence": 0.0, "control_steps": 0.0, "handover_steps": 0.0}
    alone = results(session(turn(1_000)), changes=free).first_ttft_s["p50"]
    both = results(session(turn(1_000)), session(turn(1_000)), changes=free)
    assert both.first_ttft_s["p99"] == pytest.approx(alone + prefill_s(1_000), rel=0.05)
    apart = results(session(turn(1_000)), session(turn(1_000)), changes=free, num_prefill=2)
    assert apart.first_ttft_s["p99"] == pytest.approx(alone, rel=0.05)


def test_transfers_share_a_port():
    """Two hand-overs of 10,000 tokens to one D at the same time take twice as long as one."""
    slow = {"handover_s_per_token": 0.01, "prefill_s_per_token": 1e-6}
    one = results(session(turn(10_000)), num_prefill=2, changes=slow).first_ttft_s["p99"]
    two = results(session(turn(10_000)), session(turn(10_000)), num_prefill=2, changes=slow).first_ttft_s["p99"]
    assert two - one == pytest.approx(100, rel=0.02)


def test_a_busy_home_answers_and_takes_up_between_steps():
    """Beside a stream, a turn's calls and its hand-over wait for one and a half steps of 50 ms each."""
    stream, late = session(turn(100, 200)), session(turn(1_000, 1), start=1)
    calm = results(session(turn(1_000, 1))).first_ttft_s["p50"]
    busy = results(stream, late).first_ttft_s["p99"]
    # The first of them in steps of one sequence, the others in steps of two.
    assert busy - calm == pytest.approx(1.5 * 0.05 + 1.5 * 0.06 + 0.01, rel=0.1)


def test_sequences_of_a_batch_slow_each_other_down():
    """Alone a token takes 50 ms; of two sequences each token takes 60 ms while both run."""
    assert results(session(turn(100, 101))).token_s["p50"] == pytest.approx(0.05, rel=0.01)
    both = results(session(turn(100, 101)), session(turn(100, 101)), num_prefill=2)
    assert both.token_s["p50"] == pytest.approx(0.06, rel=0.02)


def test_a_prefill_on_the_home_holds_up_what_decodes_there():
    """While 5,000 tokens are computed in five steps on D, a stream gets five tokens, not a hundred."""
    stream, prompt = session(turn(100, 101)), session(turn(5_000, 1), start=1)
    calm = results(stream, route="local").token_s["p99"]
    held_up = results(stream, prompt, route="local").token_s["p99"]
    assert held_up - calm == pytest.approx(prefill_s(5_000) / 100, rel=0.1)


def test_engines_on_one_machine_take_each_others_time():
    """A prefill of 1.2 s beside a stream takes twice that, and the stream's steps three times theirs meanwhile."""
    stream, prompt = session(turn(100, 101)), session(turn(1_000, 1), start=1)
    apart = results(stream, prompt)
    beside = results(stream, prompt, changes={"prefill_slowdown": 2.0, "decode_slowdown": 3.0})
    later = beside.first_ttft_s["p99"] - apart.first_ttft_s["p99"]
    assert later == pytest.approx(prefill_s(1_000), rel=0.1)
    lost_steps_s = 2 * prefill_s(1_000) * (1 - 1 / 3)
    assert (beside.token_s["p99"] - apart.token_s["p99"]) * 100 == pytest.approx(lost_steps_s, rel=0.15)


def test_a_request_waits_for_blocks_until_another_one_ends():
    """Two requests that do not fit together run one after the other, and none is refused."""
    found = results(session(turn(30_000, 100)), session(turn(30_000, 100)), num_prefill=2)
    assert found.refused == {}
    assert found.num_turns == 2
    assert found.first_ttft_s["p99"] - found.first_ttft_s["p50"] > 2  # half of the other one's 5 s


@pytest.mark.parametrize(("tokens", "why"), [(60_000, "no_room"), (100_000, "over_context")])
@pytest.mark.parametrize("route", ["fetch", "local"])
def test_what_can_never_be_served_is_refused_and_ends_its_session(tokens, why, route):
    """A prompt longer than the pool, or than the context, is counted by name; others go on."""
    found = results(session(turn(tokens), turn(10)), session(turn(100), start=500), route=route)
    assert found.refused == {why: 1}
    assert found.num_turns == 1


# ---------------------------------------------------------------- whole fleets


def test_one_seed_gives_one_result():
    """Two runs agree in every figure; another seed of the traffic does not."""

    def run(seed):
        sessions = generate(SMALL, 40, seed=seed, rate_per_s=2)
        return results(*sessions, num_prefill=3, num_decode=3, chunk_tokens=50, ttl=5, changes={"pool_tokens": 20_000})

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("route", ["fetch", "local", "prefill", "recompute"])
def test_nothing_is_lost(route):
    """All planned turns are answered, and their tokens add up, also where leases and requests crowd the pool."""
    sessions = list(generate(SMALL, 60, seed=1, rate_per_s=5))
    found = results(
        *sessions,
        route=route,
        num_prefill=2,
        num_decode=2,
        ttl=20,
        has_prefill_cache=True,
        changes={"pool_tokens": 15_000},
    )
    assert found.num_turns == sum(len(one.turns) for one in sessions)
    assert found.num_sessions == 60
    tokens = found.tokens
    assert tokens["reused"] + tokens["fetched"] + tokens["computed"] == tokens["prompt"]
    assert sum(found.outcomes.values()) == pytest.approx(1)
    assert sum(found.reasons.values()) == pytest.approx(1)
    if route == "fetch":
        assert found.leases["revoked"] + found.leases["clipped"] > 0


def test_more_engines_wait_less():
    """Under one load the tail gets shorter with each engine that is added."""
    sessions = list(generate(SMALL, 100, seed=3, rate_per_s=5))
    tails = [results(*sessions, num_prefill=n, num_decode=n, chunk_tokens=100).queue_s["p99"] for n in (1, 2, 4)]
    assert tails == sorted(tails, reverse=True)
    assert tails[0] > 2 * tails[2]


def test_counting_leases_more_coarsely_changes_little():
    """Chunks of 500 tokens give the same figures as chunks of 50, within a few per cent."""
    sessions = list(generate(AGENT.fitting(60_000), 30, seed=3, rate_per_s=0.0005))
    fine, coarse = (
        results(*sessions, chunk_tokens=n, ttl=60, changes={"pool_tokens": 200_000, "prefill_s_per_token": 1e-5})
        for n in (50, 500)
    )
    assert coarse.later_ttft_s["p50"] == pytest.approx(fine.later_ttft_s["p50"], rel=0.05)
    assert coarse.tokens["fetched"] == pytest.approx(fine.tokens["fetched"], rel=0.05)


def test_only_the_middle_of_a_run_is_judged():
    """Turns before a quarter of the time in which sessions begin, and behind it, do not count."""
    from server_ext.simulation.fleet import Fleet

    sessions = [session(turn(100), start=start) for start in (0, 10, 30, 50, 99, 120)]
    found = Fleet(config()).run(iter(sessions), last_start_s=100).results()
    assert (found.num_turns, found.num_judged) == (6, 3)
    assert found.turns_per_s == pytest.approx(3 / 75)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"num_decode": 0}, "num_decode"), ({"num_prefill": -1}, "num_prefill"), ({"chunk_tokens": 0}, "chunk_tokens")],
)
def test_a_fleet_that_makes_no_sense_is_refused_by_name(changes, named):
    """The error names the value and its least."""
    with pytest.raises(ValueError, match=f"{named} is .*at least"):
        replace(config(), **changes)


def test_the_rates_of_the_tests_are_plain():
    """What the builders take is a fleet like any other."""
    assert isinstance(config(), FleetConfig)
    assert RATES.prefill_s(1_000) == pytest.approx(prefill_s(1_000))


def waiting_turn(num_new, compute_s):
    """Return what P looks at of a turn."""
    return SimpleNamespace(num_new=num_new, compute_s=compute_s)


def test_prompts_that_wait_share_a_step_of_p():
    """As far as 1,000 tokens reach; each but the first one saves the 0.1 s that a step costs at least."""
    engine = PrefillEngine("0", RATES, 0)
    turns = [waiting_turn(*one) for one in ((900, 1.0), (600, 0.7), (400, 0.5), (1, 0.1005))]
    assert [engine.add(turn, now_s=0.0) for turn in turns] == [True, False, False, False]
    assert (engine.next_end_s(), engine.free_s()) == (1.0, pytest.approx(2.3005))
    assert engine.pop(now_s=1.0) == turns[:1]
    assert engine.next_end_s() == pytest.approx(1.0 + 0.7 + 0.4)
    assert engine.pop(now_s=2.1) == turns[1:3]
    assert engine.pop(now_s=2.2005) == turns[3:]
    assert not engine.computing


def test_a_prompt_longer_than_a_step_of_p_is_computed_alone():
    """What waits behind it does not go into its last step."""
    engine = PrefillEngine("0", RATES, 0)
    for one in ((10, 0.2), (5_000, 6.0), (10, 0.2)):
        engine.add(waiting_turn(*one), now_s=0.0)
    engine.pop(now_s=0.2)
    assert [turn.num_new for turn in engine.computing] == [5_000]
