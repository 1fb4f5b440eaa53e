"""Two tenants, a small budget, and tickets that are always too late. The last file: it needs a stack of its own."""

from typing import Any

import pytest

from bidikv_sdk import AuthenticationError, BidiKV
from server_ext.launch.tiny import TINY

from .common import BLOCK_SIZE, POOL_BLOCKS
from .conftest import ALICE, BOB
from .rig import Rig
from .talk import words


@pytest.mark.parametrize("stream", [True, False])
def test_a_late_ticket(keyed: Rig, stream: bool) -> None:
    """P declines a ticket that it could not finish in time, computes, and the answer is right."""
    talk = keyed.talk(key=ALICE)
    talk.right_turn(words(120), stream=stream)
    said = talk.right_turn("And now?", stream=stream)
    assert said.came == ("recomputed", "ticket_late")
    assert said.cache["held_tokens"] > 64
    assert talk.right_turn("Home, then.", route="local").came == ("local", "forced")


def test_a_lease_within_the_budget(keyed: Rig) -> None:
    """What the budget does not allow is not leased: the lease is the beginning of the turn, and says why."""
    budget = int(POOL_BLOCKS * 0.2)
    talk = keyed.talk(key=ALICE)
    said = talk.right_turn(words(400))
    assert len(said.prompt_ids) > budget * BLOCK_SIZE
    lease = said.lease
    assert (lease["state"], lease["reason"]) == ("active", "over_budget")
    assert (lease["num_blocks"], lease["num_tokens"]) == (budget, budget * BLOCK_SIZE)
    assert said.pool["free_blocks"] == POOL_BLOCKS - budget
    other = keyed.talk(key=BOB)
    assert other.right_turn(words(60)).lease | {"remaining_s": 0} == {
        "state": "none",
        "remaining_s": 0,
        "num_tokens": 0,
        "num_blocks": 0,
        "reason": "over_budget",
    }
    # Both go on, with what they have; D's own prefix cache may still have more.
    assert talk.right_turn("And now?", route="local").cache["reused_tokens"] >= budget * BLOCK_SIZE
    assert other.right_turn("And now?").came == ("recomputed", "over_budget")


@pytest.mark.parametrize(
    ("method", "verb", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/extend", {}),
        ("POST", "/release", {}),
        ("POST", "/end", {}),
        ("POST", "/turns", {"turn": 2, "messages": [{"role": "user", "content": "Mine."}]}),
    ],
)
def test_another_tenants_session_is_an_unknown_one(keyed: Rig, method: str, verb: str, body: Any) -> None:
    """For another tenant's id the reply is that for an id which nobody has, to the letter."""
    talk = keyed.talk(key=ALICE)
    talk.right_turn(words(60))
    before = talk.info()
    replies = []
    for name in (talk.id, "test-" + "0" * (len(talk.id) - 5)):
        headers = {**keyed.headers(BOB), "X-Session-ID": name, "X-Request-Id": "same"}
        reply = keyed.decode.request(method, f"/v1/sessions/{name}{verb}", json=body, headers=headers)
        replies.append((reply.status_code, reply.text.replace(name, "…"), dict(reply.headers) | {"date": ""}))
    assert replies[0] == replies[1]
    assert replies[0][0] == 404
    after = talk.info()
    assert after["lease"].pop("remaining_s") <= before["lease"].pop("remaining_s")
    assert after == before
    assert [info["session"] for info in keyed.sessions(BOB)] == []


def test_the_same_id_is_two_sessions_of_two_tenants(keyed: Rig) -> None:
    """An id belongs to its tenant: the same one, used by another, is another session with a cache of its own."""
    alice = keyed.talk("shared", key=ALICE)
    bob = keyed.talk("shared", key=BOB)
    alice.right_turn(words(100, "secrets"))
    said = bob.right_turn(words(100, "secrets"), route="local")
    assert said.came == ("recomputed", "forced")
    assert said.cache["reused_tokens"] == 0
    assert alice.right_turn("Mine?", route="local").cache["outcome"] == "local"
    bob.release()
    assert alice.lease()["state"] == "active"
    assert [info["session"] for info in keyed.sessions(ALICE)] == ["shared"]


@pytest.mark.parametrize("key", [None, "guess"])
def test_without_a_key_there_is_nothing(keyed: Rig, key: str | None) -> None:
    """Without a key that the server knows, every route is a 401, which the SDK raises as what it is."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for method, path in (("GET", ""), ("POST", ""), ("GET", "/shared"), ("POST", "/shared/turns")):
        reply = keyed.decode.request(method, f"/v1/sessions{path}", headers=headers)
        assert reply.status_code == 401
    stranger = BidiKV(f"{keyed.stack.url}/v1", api_key=key or "none", model=TINY)
    with stranger, pytest.raises(AuthenticationError):
        stranger.session().send("Hello?")
    with BidiKV(f"{keyed.stack.url}/v1", api_key=BOB, model=TINY) as client, client.session() as session:
        assert session.send("Hello?", max_tokens=4).turn == 1


def test_a_key_does_not_salt_what_it_does_not_own(keyed: Rig) -> None:
    """Two tenants with one prompt share nothing in D's prefix cache; one tenant's two sessions do."""
    first, second, other = keyed.talk(key=ALICE), keyed.talk(key=ALICE), keyed.talk(key=BOB)
    assert first.turn(words(100, "plans"), route="local").cache["reused_tokens"] == 0
    assert other.turn(words(100, "plans"), route="local").cache["reused_tokens"] == 0
    assert second.turn(words(100, "plans"), route="local").cache["reused_tokens"] > 0
