"""What a turn says after something has gone: the lease, P, or D."""

import pytest

from bidikv_sdk import BidiKV
from server_ext.launch.tiny import TINY

from .common import BLOCK_SIZE, POOL_BLOCKS, eventually
from .rig import Rig
from .talk import Talk, words


@pytest.fixture
def talk(rig: Rig) -> Talk:
    """A session that has had a turn, and a lease of a second and a half."""
    talk = rig.talk()
    talk.right_turn(words(200), ttl_s=1.5)
    return talk


def test_after_release(rig: Rig, talk: Talk) -> None:
    """A turn after a release recomputes, because it was asked to give everything back."""
    talk.release()
    said = talk.right_turn("And now?")
    assert (said.came, said.cache["held_tokens"]) == (("recomputed", "released"), 0)
    talk.fetched_turn("And then?")


def test_after_expiry(rig: Rig, talk: Talk) -> None:
    """A turn after its lease's end is served from the whole blocks that nobody has used since, and says why not all."""
    num_blocks = talk.last.lease["num_tokens"] // BLOCK_SIZE
    eventually(lambda: talk.lease()["state"] == "expired", "the lease's end")
    assert rig.pool()["free_blocks"] == POOL_BLOCKS
    said = talk.fetched_turn("And now?", ttl_s=1.5)
    assert (said.came, said.cache["held_tokens"]) == (("fetched", "lease_expired"), num_blocks * BLOCK_SIZE)
    assert said.lease["reason"] is None
    eventually(lambda: talk.lease()["state"] == "expired", "the second lease's end")
    assert rig.decode.post("/reset_prefix_cache").json() == {"success": True}
    said = talk.right_turn("And then?")
    assert (said.came, said.cache["held_tokens"]) == (("recomputed", "lease_expired"), 0)


def test_an_extension_keeps_a_lease_alive_and_cannot_bring_it_back(rig: Rig, talk: Talk) -> None:
    """`extend` never shortens; on a lease that is gone it says why."""
    extended = talk.post("extend", {"ttl_s": 300}).json()["bidikv"]["lease"]
    assert 290 < extended["remaining_s"] <= 300
    assert talk.post("extend", {"ttl_s": 1}).json()["bidikv"]["lease"]["remaining_s"] > 290
    talk.release()
    refused = talk.post("extend", {"ttl_s": 300})
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["code"], error["reason"]) == ("lease_lost", "released")


def test_with_p_gone_and_back(rig: Rig) -> None:
    """Without P a turn runs on D from its lease, or from nothing; with a new P it is fetched again."""
    talk, other = rig.talk(), rig.talk()
    talk.right_turn(words(200))
    other.right_turn(words(150))
    other.release()
    rig.kill("prefill")
    held = talk.turn("Still there?")
    assert held.came == ("local", "prefill_unavailable")
    assert held.pool["pending_ticket_blocks"] == 0  # nobody can be reading: the ticket is back at once
    unheld, first = other.turn("You too?", route="recompute"), rig.talk().turn(words(100, "firsts"))
    assert unheld.came[1] == first.came[1] == "prefill_unavailable"
    rig.restart("prefill")
    for said in (held, unheld, first):
        assert said.ids == rig.recomputed(said.prompt_ids, len(said.ids))
    talk.fetched_turn("Better?")


def test_with_d_restarted(rig: Rig) -> None:
    """A session whose home was restarted is opened again by the SDK, says so, and is whole from the next turn on."""
    with BidiKV(f"{rig.stack.url}/v1", model=TINY) as client:
        session = client.session(system="Be terse.", temperature=0, max_tokens=12, return_token_ids=True)
        for text in (words(100), "And then?"):
            assert not session.send(text).reopened
        rig.kill("decode")
        rig.restart("decode")
        turn = session.send("Where were we?")
        assert turn.reopened
        assert (turn.cache.outcome, turn.cache.reason) == ("recomputed", "home_lost")
        ids = turn.completion["choices"][0]["token_ids"]
        assert ids == rig.recomputed(turn.completion["prompt_token_ids"], len(ids))
        turn = session.send("I see.")
        assert not turn.reopened
        assert turn.cache.outcome == "fetched"
        assert turn.cache.fetched_tokens == turn.cache.held_tokens
        assert session.turn == turn.turn == 4
        session.end()
