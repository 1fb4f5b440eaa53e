"""How the arms of a scenario take turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from server_ext.benchmark.rounds import Company, Reference, run_rounds
from server_ext.benchmark.scenarios import Scenario, growing
from server_ext.traffic import PlannedSession, PlannedTurn
from tests.benchmark.made import MadeArm, sample

TWO_AGENTS = Scenario(
    name="made",
    what="",
    plan=growing([20, 30], num_turns=3, delta_tokens=(4, 8), output_tokens=1),
    arms=("no_reuse", "fetch", "local"),
)


def run(arms, scenario=TWO_AGENTS, *, num_rounds=1, company=None, is_over=lambda: False, reference=None):
    """Run rounds and return their parts."""

    async def collect():
        rounds = run_rounds(
            scenario,
            {arm.name: arm for arm in arms},
            reference=reference or Reference(),
            num_rounds=num_rounds,
            seed=1,
            company=company or Company(),
            is_over=is_over,
        )
        return [part async for part in rounds]

    return asyncio.run(collect())


def made_arms(*names, **options):
    """Make arms that share one log."""
    log = []
    return [MadeArm(name, log, **options) for name in names], log


def test_every_arm_runs_every_conversation_once_a_round():
    """No arm has more turns than another, and the reference goes first in each round."""
    arms, _ = made_arms("no_reuse", "fetch", "local")
    parts = run(arms, num_rounds=3)
    assert [part.arm for part in parts[::3]] == ["no_reuse"] * 3
    assert sorted(part.arm for part in parts) == ["fetch"] * 3 + ["local"] * 3 + ["no_reuse"] * 3
    assert {(part.round, len(part.samples)) for part in parts} == {(0, 6), (1, 6), (2, 6)}


def test_the_order_of_the_arms_changes_between_rounds():
    """What a machine does slowly over time meets every arm in every place."""
    arms, _ = made_arms("no_reuse", *(f"arm{number}" for number in range(6)))
    parts = run(arms, num_rounds=2)
    assert [part.arm for part in parts[:7]] != [part.arm for part in parts[7:]]


def test_an_arm_prepares_its_engines_before_its_turns_and_ends_its_sessions():
    """Nothing cached is left from the arm before, and nothing is held for the next one."""
    arms, log = made_arms("no_reuse", "fetch")
    run(arms)
    assert log[0] == ("prepare", "no_reuse", -1)
    assert log[9] == ("prepare", "fetch", -1)
    assert [entry[0] for entry in log].count("close") == 4


def test_one_agent_at_a_time_runs_alone():
    """A closed loop of one: an agent begins when the one before has ended."""
    arms, log = made_arms("no_reuse")
    run(arms)
    assert [number for what, _, number in log if what == "turn"] == [0, 0, 0, 1, 1, 1]


def test_agents_at_once_run_side_by_side():
    """Two at once: their turns mix."""
    arms, log = made_arms("no_reuse")
    run(arms, replace(TWO_AGENTS, at_once=2))
    assert [number for what, _, number in log if what == "turn"] != [0, 0, 0, 1, 1, 1]


def test_the_reference_tells_what_each_turn_added():
    """Stock arms replay the ids that the reference was asked, turn by turn, also behind a rewind."""
    turns = (
        PlannedTurn(0.0, False, 20, 1),
        PlannedTurn(0.0, True, 5, 1),
        PlannedTurn(0.0, True, 6, 1, kept_tokens=21),
    )
    edited = replace(TWO_AGENTS, plan=lambda _: [PlannedSession(0.0, turns)])
    reference = Reference()
    arms, _ = made_arms("no_reuse")
    run(arms, edited, reference=reference)
    assert [len(reference.continuation(0, turn).token_ids) for turn in (1, 2, 3)] == [10, 5, 6]


def test_other_tokens_than_the_reference_are_seen():
    """An arm whose answers differ is wrong in each of its turns, and so is a turn that the reference never had."""
    log = []
    reference = Reference()
    parts = run([MadeArm("no_reuse", log), MadeArm("fetch", log), MadeArm("odd", log, shift=1)], reference=reference)
    wrong = {part.arm: sum(map(reference.differs, part.samples)) for part in parts}
    assert wrong == {"no_reuse": 0, "fetch": 0, "odd": 6}
    assert reference.differs(sample(session=99))


def test_what_a_server_does_not_tell_stays_unknown():
    """A stock arm has no outcome; what it reports as cached was not computed."""
    arms, _ = made_arms("no_reuse", tells=False)
    (part,) = run(arms)
    assert {one.outcome for one in part.samples} == {""}
    assert all(one.computed_tokens == one.prompt_tokens for one in part.samples)


def test_counters_are_those_of_the_part():
    """What the engines counted before does not count."""
    arms, _ = made_arms("no_reuse")
    assert [part.counters for part in run(arms, num_rounds=2)] == [{"bytes_moved": 10.0}] * 2


def test_no_round_begins_once_the_time_is_over():
    """A run ends after whole rounds, and never without one."""
    arms, _ = made_arms("no_reuse", "fetch")
    assert len(run(arms, num_rounds=5, is_over=lambda: True)) == 2


def alone(num_turns, **changes):
    """A scenario with one agent."""
    plan = growing([20], num_turns=num_turns, delta_tokens=(4, 8), output_tokens=1)
    return replace(TWO_AGENTS, plan=plan, **changes)


def test_requests_beside_decode_during_the_turns_that_were_chosen():
    """Those turns say that they had company; it ends with them, and gaps are taken while an agent asks."""
    started, ended = [], []
    arms, log = made_arms("no_reuse")

    async def complete(prompt_ids, num_tokens, state):
        started.append(prompt_ids)
        try:
            while True:
                yield {"choices": [{"token_ids": [1]}]}
                await asyncio.sleep(0)
        finally:
            ended.append(len(log))

    scenario = alone(5, num_beside=2, turns_beside=(3, 4))
    (part,) = run(arms, scenario, company=Company(beside={"no_reuse": complete}))
    assert [one.beside for one in part.samples] == [False, False, True, True, False]
    assert len(started) == 2
    assert ended == [5, 5]  # prepare and four turns
    assert part.errors == []


def test_a_request_beside_that_fails_is_told():
    """The agents go on; the error stands in the file."""

    async def complete(prompt_ids, num_tokens, state):
        msg = "no engine"
        raise RuntimeError(msg)
        yield {}

    arms, _ = made_arms("no_reuse")
    scenario = alone(2, num_beside=1, turns_beside=(2,))
    (part,) = run(arms, scenario, company=Company(beside={"no_reuse": complete}))
    assert len(part.samples) == 2
    assert part.errors == ["RuntimeError('no engine')"]


def test_other_sessions_are_computed_between_the_turns():
    """Each prompt is asked for one token, before every turn but the first, on the engine that prefills for the arm."""
    arms, log = made_arms("no_reuse")

    async def complete(prompt_ids, num_tokens, state):
        log.append(("crowd", len(prompt_ids), num_tokens))
        yield {"choices": []}

    run(arms, alone(3, num_crowd=2, crowd_tokens=7), company=Company(crowd={"no_reuse": complete}))
    turn, crowd = ("turn", "no_reuse", 0), ("crowd", 7, 1)
    assert log[1:-1] == [turn, crowd, crowd, turn, crowd, crowd, turn]


def test_other_sessions_need_an_engine():
    """Without their prompts the arm would look better than it is."""
    arms, _ = made_arms("no_reuse")
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="no_reuse has no engine")):
        run(arms, alone(2, num_crowd=1, crowd_tokens=7))


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_end_of_a_conversation_is_not_in_an_arms_time(monkeypatch, at_once):
    """Where agents run one by one; side by side others go on meanwhile, and it is."""
    clock = [0.0]
    monkeypatch.setattr("server_ext.benchmark.rounds.time.perf_counter", lambda: clock[0])

    class Slow(MadeArm):
        async def open(self, script):
            agent = await super().open(script)
            run_turn, end = agent.run, agent.close

            async def run(ask):
                clock[0] += 1.0
                return await run_turn(ask)

            async def close():
                clock[0] += 100.0
                await end()

            agent.run, agent.close = run, close
            return agent

    (part,) = run([Slow("no_reuse", [])], replace(TWO_AGENTS, at_once=at_once))
    assert part.seconds == (6.0 if at_once == 1 else 206.0)


def test_turns_that_only_lengthen_the_history_are_told_apart():
    """They are in the samples, so that their tokens are compared."""
    arms, _ = made_arms("no_reuse")
    (part,) = run(arms, alone(3, max_delta=3))
    assert [one.is_measured for one in part.samples] == [True, False, False]


def test_an_arm_that_fails_ends_the_run():
    """A turn without an answer is no number: the error comes out."""

    class Failing(MadeArm):
        async def open(self, script):
            msg = "engine gone"
            raise ConnectionError(msg)

    with pytest.RaisesGroup(ConnectionError, ConnectionError):
        run([Failing("no_reuse", [])])
