"""Leases give way: to their owner, to time, to requests that need the blocks, and to a reset of the cache."""

import secrets

from .common import POOL_BLOCKS, eventually
from .gate import Gate, ticket_of
from .rig import Rig
from .talk import Said, Talk, words


def test_a_release_gives_every_block_back(rig: Rig) -> None:
    """The reply to a release counts all blocks of the lease as free."""
    talk = rig.talk()
    said = talk.right_turn(words(200))
    num_blocks = said.lease["num_blocks"]
    assert num_blocks == -(-said.lease["num_tokens"] // 32)
    assert said.pool["free_blocks"] == POOL_BLOCKS - num_blocks
    released = talk.release()
    assert released["pool"] == {"free_blocks": POOL_BLOCKS, "total_blocks": POOL_BLOCKS, "pending_ticket_blocks": 0}
    assert released["lease"]["state"] == "released"
    assert talk.release() == released


def test_an_expired_lease_is_free_at_the_first_look(rig: Rig) -> None:
    """On an idle engine the first query that sees a lease expired counts its blocks as free."""
    talk = rig.talk()
    talk.right_turn(words(200), ttl_s=1.5)

    def look() -> dict | None:
        info = talk.info()
        if info["lease"]["state"] == "active":
            assert info["lease"]["remaining_s"] > 0
            assert info["pool"]["free_blocks"] < POOL_BLOCKS
            return None
        return info

    info = eventually(look, "the lease's end")
    assert (info["lease"]["state"], info["lease"]["reason"]) == ("expired", "lease_expired")
    assert info["pool"]["free_blocks"] == POOL_BLOCKS


def test_blocks_of_a_ticket_whose_reader_is_stuck(rig: Rig) -> None:
    """While P hangs, the turn is answered without it; blocks that P may still read are named, and come back."""
    talk = rig.talk()
    talk.right_turn(words(200))
    num_blocks = talk.lease()["num_blocks"]
    with rig.frozen("prefill"):
        running = talk.in_background("And now?")
        eventually(lambda: talk.info()["pool"]["pending_ticket_blocks"] == num_blocks, "an open ticket")
        said = running.result()
        assert said.came == ("local", "prefill_unavailable")
        released = talk.release()
        assert released["pool"]["pending_ticket_blocks"] == num_blocks
        assert released["pool"]["free_blocks"] == POOL_BLOCKS - num_blocks
    eventually(lambda: talk.info()["pool"]["free_blocks"] == POOL_BLOCKS, "the ticket's deadline")
    assert said.ids == rig.recomputed(said.prompt_ids, len(said.ids))
    talk.right_turn("And then?")
    talk.fetched_turn("Is P back?")


def fill(rig: Rig) -> list[Talk]:
    """Fill D's pool with leases; the first one has the least time left."""
    talks: list[Talk] = []
    while rig.pool()["free_blocks"] >= 8:
        talk = rig.talk()
        talk.right_turn(words(80, f"story{len(talks)} about"), ttl_s=500.0 + len(talks))
        talks.append(talk)
    return talks


def lost(talks: list[Talk]) -> list[Talk]:
    """Check what became of leases under pressure; return the sessions whose leases are not whole."""
    leases = {talk: talk.lease() for talk in talks}
    changed = [talk for talk in talks if leases[talk]["num_blocks"] < talk.last.lease["num_blocks"]]
    for talk in talks:
        lease = leases[talk]
        assert lease["reason"] == ("lease_revoked" if talk in changed else None)
        assert lease["state"] == ("active" if lease["num_blocks"] else "revoked")
    # The one that would have ended first goes first, and only the last of them in part.
    assert changed == talks[: len(changed)]
    assert [talk for talk in changed if leases[talk]["num_blocks"]] in ([], changed[-1:])
    return changed


def num_revoked(talks: list[Talk]) -> int:
    """Return how many blocks these sessions have lost since their last turns."""
    return sum(talk.last.lease["num_blocks"] - talk.lease()["num_blocks"] for talk in talks)


def verify_go_on(talks: list[Talk]) -> None:
    """Check that sessions which lost blocks answer rightly and say why they were slow."""
    for talk in talks:
        left = talk.lease()["num_blocks"]
        said = talk.right_turn("Go on.")
        assert said.cache["reason"] in ("lease_revoked", "below_threshold")
        assert said.cache["held_tokens"] == min(left * 32, talk.last.cache["held_tokens"])


def test_a_session_turn_gets_its_blocks_from_leases(rig: Rig) -> None:
    """With the pool full of leases a new session's turn runs at once, and takes only what it needs."""
    talks = fill(rig)
    num_free = rig.pool()["free_blocks"]
    new = rig.talk()
    said: Said = new.right_turn(words(150, "news"), max_tokens=100)
    # Its tokens but the last one, which was never fed back.
    num_needed = -(-(len(said.prompt_ids) + len(said.ids) - 1) // 32)
    changed = lost(talks)
    assert num_revoked(talks) == num_needed - num_free
    assert said.lease["num_blocks"] == num_needed
    new.fetched_turn("More.")
    verify_go_on(changed[:2])


def test_a_plain_request_gets_its_blocks_from_leases(rig: Rig) -> None:
    """With the pool full of leases a request without a session runs at once, and takes only what it needs."""
    talks = fill(rig)
    num_free = rig.pool()["free_blocks"]
    prompt = [1000 + secrets.randbelow(1000) for _ in range(400)]
    body = {"model": talks[0].request("")["model"], "prompt": prompt, "max_tokens": 50, "temperature": 0}
    reply = rig.decode.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
    assert reply.json()["choices"][0]["token_ids"] == rig.recomputed(prompt, 50)
    changed = lost(talks)
    assert num_revoked(talks) == -(-(400 + 50 - 1) // 32) - num_free
    verify_go_on(changed[:2])


def test_a_request_that_can_never_fit_revokes_nothing(rig: Rig) -> None:
    """A prompt longer than the model takes is refused before it costs any lease."""
    talks = fill(rig)
    body = {"model": talks[0].request("")["model"], "prompt": [1000] * 5000, "max_tokens": 1}
    assert rig.decode.post("/v1/completions", json=body).status_code == 400
    assert lost(talks) == []


def test_a_reset_of_the_prefix_cache_releases_all_leases(rig: Rig) -> None:
    """Leases do not keep D's prefix cache from being reset; their sessions say so and go on."""
    talks = [rig.talk() for _ in range(3)]
    for talk in talks:
        talk.right_turn(words(100))
    assert rig.decode.post("/reset_prefix_cache").json() == {"success": True}
    for talk in talks:
        info = talk.info()
        assert (info["lease"]["state"], info["lease"]["reason"]) == ("revoked", "reset")
        assert info["pool"]["free_blocks"] == POOL_BLOCKS
    said = talks[0].right_turn("Go on.")
    assert said.came == ("recomputed", "reset")
    talks[0].fetched_turn("And on.")


def test_a_reset_waits_for_readers(rig: Rig) -> None:
    """While P may be reading, a reset of D's prefix cache says no, and the turn goes on untouched."""
    talk = rig.talk()
    talk.right_turn(words(200))
    answers = []

    def reset_first(gate: Gate, call: dict) -> object:
        assert ticket_of(call)
        answers.append(rig.decode.post("/reset_prefix_cache").json())
        return gate.pass_on(call)

    with Gate(rig, reset_first):
        talk.fetched_turn("And now?")
    assert answers == [{"success": False}]


def test_turns_that_outgrow_the_pool_together(rig: Rig) -> None:
    """Running turns that do not all fit are preempted on D and end with the right answers, leases or not."""
    # Four times 1,000 tokens and their prompts need more blocks than there are. They go without P, so that all four
    # have begun before the first one has grown: a turn that comes late waits, and preempts nobody.
    before = rig.metric("decode", "vllm:num_preemptions_total")
    talks = [rig.talk() for _ in range(4)]
    for number, talk in enumerate(talks):
        talk.right_turn(words(120, f"long{number}"))
    running = [talk.in_background("All of it.", route="local", max_tokens=1000, ignore_eos=True) for talk in talks]
    for said in [future.result() for future in running]:
        assert len(said.ids) == 1000
        assert said.ids == rig.recomputed(said.prompt_ids, 1000)
    assert rig.metric("decode", "vllm:num_preemptions_total") > before
    for talk in talks:
        talk.right_turn("Shorter.")
