"""Branches of a session on real engines: shared blocks, exact continuation, and nobody hurt by another's end."""

from bidikv_sdk import BidiKV
from server_ext.launch.tiny import TINY

from .common import BLOCK_SIZE
from .rig import Rig
from .talk import words

NUM_CHILDREN = 8
GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}


def long_text(rig: Rig, num_tokens: int) -> str:
    """Return a text of at least so many tokens, and not many more."""
    num_words = num_tokens // 2
    while len(rig.ids_of(words(num_words))) < num_tokens:
        num_words += 20
    return words(num_words)


def test_eight_children_of_one_long_parent(wide: Rig) -> None:
    """Children cost their own tails only, fetch the whole parent at once, and answer as without sharing."""
    parent = wide.talk()
    told = parent.right_turn(long_text(wide, 2000))
    assert len(told.prompt_ids) >= 2000
    held = parent.lease()
    children = [parent.fork() for _ in range(NUM_CHILDREN)]
    pool = parent.info()["pool"]
    assert pool["total_blocks"] - pool["free_blocks"] == held["num_blocks"]

    running = [child.in_background(f"Now do task {i}.") for i, child in enumerate(children)]
    for future in running:
        said = future.result()
        assert said.cache["outcome"] == "fetched", said.cache
        assert said.cache["fetched_tokens"] == said.cache["held_tokens"] == held["num_tokens"]
        assert said.prompt_ids[: held["num_tokens"]] == (told.prompt_ids + told.ids)[: held["num_tokens"]]
        assert said.ids == wide.recomputed(said.prompt_ids, len(said.ids))

    num_shared = held["num_tokens"] // BLOCK_SIZE
    tails = [child.lease()["num_blocks"] - num_shared for child in children]
    assert max(tails) <= 4
    pool = parent.info()["pool"]
    assert pool["total_blocks"] - pool["free_blocks"] <= held["num_blocks"] + sum(tails)

    parent.post("end").raise_for_status()
    for child in children[1:]:
        child.release()
    children[0].fetched_turn("And then?")
    children[1].right_turn("And then?")


def test_branches_of_earlier_turns(rig: Rig) -> None:
    """A child of an earlier turn and a rewound session both continue D's own ids of then, from their own leases."""
    talk = rig.talk()
    first = talk.right_turn(words(80))
    second = talk.fetched_turn("More.")
    talk.fetched_turn("Even more.")
    child = talk.fork(first, at_turn=1)
    assert child.lease()["num_tokens"] <= len(first.prompt_ids) + len(first.ids)
    said = child.fetched_turn("Otherwise.")
    # All that the model said then, but for an end of turn: that is the template's.
    generated = first.prompt_ids + first.ids[:-1]
    assert said.prompt_ids[: len(generated)] == generated
    info = talk.rewind(second, turn=2)
    assert info["lease"]["num_blocks"] <= -(-(len(second.prompt_ids) + len(second.ids)) // BLOCK_SIZE)
    talk.fetched_turn("Or else.")
    talk.post("end").raise_for_status()
    child.fetched_turn("And then?")


def test_the_sdks_branches(rig: Rig) -> None:
    """Fork, rewind, compact and resume through the client, each with the cache of what it continues."""
    with BidiKV(f"{rig.stack.url}/v1", model=TINY) as client, client.session(system="Be terse.", **GREEDY) as session:
        session.send(words(80))
        held = session.send("More.").lease.num_tokens
        with session.fork() as child, session.fork(at_turn=1) as other:
            turn = child.send("To the end.")
            assert (turn.cache.outcome, turn.cache.fetched_tokens) == ("fetched", held)
            turn = other.send("Otherwise.")
            assert (turn.turn, turn.cache.outcome, turn.cache.diverged_at) == (2, "fetched", None)
        assert session.status().lease.state == "active"
        resumed = client.resume(session.id, session.transcript, **GREEDY)
        turn = resumed.send("From elsewhere.")
        assert (turn.turn, turn.reopened, turn.cache.fetched_tokens) == (3, False, held)
        session.rewind(1)
        turn = session.send("Again.")
        assert (turn.turn, turn.cache.outcome, turn.cache.diverged_at) == (2, "fetched", None)
        system, asked, *_ = session.transcript
        session.replace_history([system, asked, {"role": "assistant", "content": "A summary."}])
        turn = session.send("And now?")
        assert (turn.turn, turn.cache.outcome, turn.cache.reason) == (2, "fetched", "messages_changed")
        assert 0 < turn.cache.fetched_tokens == turn.cache.diverged_at < turn.cache.held_tokens
