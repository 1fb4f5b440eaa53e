"""Several turns of a session: where the prompt's cache comes from, on every route."""

import pytest

from .rig import Rig
from .talk import words


@pytest.mark.parametrize("stream", [True, False])
def test_every_later_turn_fetches_all_that_is_held(rig: Rig, stream: bool) -> None:
    """From the second turn on P fetches all that D holds, and the tokens are those of a recompute."""
    talk = rig.talk()
    first = talk.right_turn(words(200), stream=stream)
    assert first.came == ("recomputed", "first_turn")
    for number in range(2, 6):
        before = talk.last
        said = talk.fetched_turn(f"Question {number}?", stream=stream)
        assert said.cache["reason"] == "cheapest"
        assert said.cache["held_tokens"] == before.lease["num_tokens"]
        # The last token that was generated has never been fed back, so it is not in the cache.
        assert before.lease["num_tokens"] == len(before.prompt_ids) + len(before.ids) - 1
        assert said.cache["fetched_tokens"] >= 0.95 * before.lease["num_tokens"]


def test_a_session_that_recomputes_everything_says_the_same(rig: Rig) -> None:
    """The same deltas on a session whose turns are all recomputed give the same tokens, turn by turn."""
    fetching, recomputing = rig.talk(), rig.talk()
    for delta in (words(150), "And then?", words(40, "pears"), "So?"):
        fetched = fetching.turn(delta)
        recomputed = recomputing.turn(delta, route="recompute")
        assert recomputed.prompt_ids == fetched.prompt_ids
        assert recomputed.ids == fetched.ids
        assert recomputed.came == ("recomputed", "forced")
        assert recomputed.cache["computed_tokens"] == len(recomputed.prompt_ids)
    assert fetching.last.cache["outcome"] == "fetched"


@pytest.mark.parametrize(
    ("route", "outcome", "reason"),
    [
        ("fetch", "fetched", "forced"),
        ("local", "local", "forced"),
        # P's own cache never hits here, so what P computes is all of it.
        ("prefill", "recomputed", "forced"),
        ("recompute", "recomputed", "forced"),
    ],
)
def test_every_route_is_right_and_says_what_it_did(rig: Rig, route: str, outcome: str, reason: str) -> None:
    """A forced route is taken, its report is true, and the turn behind it fetches again."""
    talk = rig.talk()
    talk.right_turn(words(200))
    said = talk.right_turn("Which way?", route=route)
    assert said.came == (outcome, reason)
    held = said.cache["held_tokens"]
    assert held == len(talk.last.prompt_ids) - said.cache["prompt_tokens"] + held
    reused, fetched = said.cache["reused_tokens"], said.cache["fetched_tokens"]
    if outcome == "local":
        # D's prefix cache knows whole blocks only.
        assert (reused, fetched) == (held // 32 * 32, 0)
    elif outcome == "fetched":
        assert (reused, fetched) == (0, held)
    else:
        assert (reused, fetched) == (0, 0)
    timings = said.cache["timings_s"]
    assert (timings["prefill"] is None) == (outcome == "local")
    assert (timings["fetch"] is None) == (outcome != "fetched")
    if route != "recompute":  # its blocks carry a salt of their own on D, and are leased all the same
        talk.fetched_turn("And back?")


def test_a_turn_fetches_what_a_recomputed_one_left(rig: Rig) -> None:
    """A recomputed turn leaves a lease like any other."""
    talk = rig.talk()
    talk.right_turn(words(100), route="recompute")
    talk.fetched_turn("And now?")


def test_little_is_not_fetched(rig: Rig) -> None:
    """A lease too short to be worth a transfer is not read, and the report says so."""
    talk = rig.talk()
    talk.right_turn("Hi.", max_tokens=1)
    said = talk.right_turn("And?")
    assert 0 < said.cache["held_tokens"] < 64
    assert said.came == ("recomputed", "below_threshold")


def test_sessions_run_side_by_side(rig: Rig) -> None:
    """Turns of several sessions at the same time do not get into each other's way."""
    talks = [rig.talk() for _ in range(4)]
    for number, talk in enumerate(talks):
        talk.turn(words(100, f"topic{number}"))
    for said in [talk.in_background("Go on.") for talk in talks]:
        assert said.result().cache["outcome"] == "fetched"
    for talk in talks:
        talk.fetched_turn("And on.")


def test_the_first_token_leaves_before_the_last_is_made(rig: Rig) -> None:
    """A client that leaves at the first piece of text stops a generation that was still going on."""
    talk = rig.talk()
    talk.right_turn(words(60))
    before = rig.metric("decode", "vllm:generation_tokens_total")
    body = talk.request("Tell me everything.", stream=True, max_tokens=1000, ignore_eos=True)
    with rig.decode.stream("POST", f"/v1/sessions/{talk.id}/turns", json=body, headers=talk.headers) as response:
        lines = response.iter_lines()
        assert any('"content":"' in line and '"content":""' not in line for line in lines)
    talk.wait_until_idle()
    assert rig.metric("decode", "vllm:generation_tokens_total") - before < 1000
    talk.fetched_turn("Never mind.")
