"""What is written in each block: nobody ever reads tokens that were computed from another history.

`Memory` stands in for the model: a position of a block holds all the ids from which its KV was computed. That is what
makes an answer a cold one's, whichever way its prompt came.
"""

import pytest

from .harness import BLOCK_SIZE, ids

NUM_BLOCKS = 24
ORIGINAL = ids(3 * BLOCK_SIZE + 10)


class Memory:
    """A scheduler's blocks, and what its steps write into them."""

    def __init__(self, harness):
        self._harness = harness
        self._written = {}

    def step(self):
        """Run one step; check that each request in it stands on what was computed from its own ids."""
        step = self._harness.step()
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            request = self._harness.scheduler.requests[req_id]
            (block_ids,) = self._harness.scheduler.kv_cache_manager.get_block_ids(req_id)
            end = request.num_computed_tokens
            self.verify(block_ids, request.all_token_ids, end - num_tokens)
            for position in range(end - num_tokens, end):
                self._written[self._place(block_ids, position)] = tuple(request.all_token_ids[: position + 1])
        self._harness.answer(step)

    def verify(self, block_ids, token_ids, num_tokens):
        """Check that blocks hold the first `num_tokens` ids, each computed from all before it."""
        for position in range(num_tokens):
            assert self._written[self._place(block_ids, position)] == tuple(token_ids[: position + 1])

    def _place(self, block_ids, position):
        return block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE

    def run(self, request_id, prompt_ids, **options):
        """Run a request to its end; return it."""
        request = self._harness.add(request_id, list(prompt_ids), **options)
        while not request.is_finished():
            self.step()
        return request

    def turn(self, number, prompt_ids, session_id):
        """Run a turn of a session on D, which hits what it can; return all of its ids."""
        begun = self._harness.begin(prompt_ids, turn=number, session_id=session_id)
        request = self.run(f"{session_id}{number}", prompt_ids, max_tokens=2, session_id=begun["nonce"])
        self._harness.settle(begun, request.all_token_ids)
        return list(request.all_token_ids)

    def read(self, number, prompt_ids, session_id):
        """Begin a turn as a reader would, and read its ticket; return how many tokens that gave."""
        begun = self._harness.begin(prompt_ids, turn=number, session_id=session_id, want_ticket=True)
        ticket = begun["ticket"]
        if ticket is not None:
            self.verify(ticket["remote_block_ids"][0], prompt_ids, ticket["remote_num_tokens"])
        self._harness.control("abandon", nonce=begun["nonce"], return_ticket=True)
        return 0 if ticket is None else ticket["remote_num_tokens"]

    def flood(self):
        """Let requests write into every block that is free, in one step."""
        num_free = self._harness.num_free
        for start, count in ((80_000, num_free // 2), (90_000, num_free - num_free // 2)):
            self._harness.add(f"flood{start}", ids(count * BLOCK_SIZE - 1, start), max_tokens=1)
        self.step()
        assert self._harness.num_free == num_free
        assert not self._harness.scheduler.has_unfinished_requests()


@pytest.fixture
def clock(monkeypatch):
    """A clock of the connector that stands still until a test moves it."""
    now_s = [1000.0]
    monkeypatch.setattr("server_ext.engine.decode.time.perf_counter", lambda: now_s[0])
    return now_s


@pytest.fixture
def d(make_harness, clock):
    """A scheduler of D all of whose blocks may be leased; the longest request takes 16 of 24."""
    return make_harness("decode", num_blocks=NUM_BLOCKS, budget_fraction=1.0, min_fetch_tokens=0)


@pytest.mark.parametrize("other", ["a fork", "a session of its own"])
@pytest.mark.parametrize("edit", ["edited", "truncated", "rewound"])
def test_an_edited_session_leaves_the_original_to_others(d, edit, other):
    """A session whose history changes takes nothing from another one with the original, and gives it nothing new."""
    memory = Memory(d)
    original = memory.turn(1, ORIGINAL, "a")
    grown = memory.turn(2, [*original, *ids(40, 3000)], "a")
    if other == "a fork":
        d.control("fork", session_id="a", child_id="b", at_turn=1, ttl_s=None)
    else:
        memory.turn(1, ORIGINAL, "b")
    if edit == "rewound":
        d.control("rewind", session_id="a", turn=1)
        changed, turn = [*original, *ids(50, 5000)], 2
    else:
        d.control("open", session_id="a", chunk=b"{}", turn=2, replace=True)
        changed = [*grown[:50], *ids(60, 5000)] if edit == "edited" else grown[:70]
        turn = 3
    # Of the session's own lease only what has not changed is read.
    assert memory.read(turn, changed, "a") == {"edited": 50, "truncated": 70, "rewound": len(original)}[edit]
    memory.turn(turn, changed, "a")
    memory.flood()
    continued = [*original, *ids(20, 7000)]
    # The last token of a turn is fed back by the next one only.
    assert memory.read(2, continued, "b") == len(original) - (other != "a fork")
    memory.turn(2, continued, "b")
    memory.run("stock", continued, max_tokens=2)
    memory.run("stock, edited", changed, max_tokens=2)


def test_the_blocks_of_a_ticket_are_written_again_only_when_it_is_over(d, clock):
    """A ticket outlives its lease; behind its deadline others write, and what a reader used of that is counted."""
    memory = Memory(d)
    original = memory.turn(1, ORIGINAL, "s")
    prompt_ids = [*original, *ids(20, 7000)]
    begun = d.begin(prompt_ids, turn=2, want_ticket=True)
    (block_ids,), num_tokens = begun["ticket"]["remote_block_ids"], begun["ticket"]["remote_num_tokens"]
    d.control("abandon", nonce=begun["nonce"], return_ticket=False)
    d.control("release")
    memory.flood()
    memory.verify(block_ids, prompt_ids, num_tokens)
    clock[0] += 600.0
    d.control("get")
    assert d.num_free == NUM_BLOCKS
    memory.flood()
    with pytest.raises(AssertionError):
        memory.verify(block_ids, prompt_ids, num_tokens)
    d.control("return_ticket", ticket_id=begun["ticket_id"], read_age_s=0.0)
    assert d.scheduler.connector.control("metrics", {})["metrics"]["bidikv_stale_reads_total"] == [([], 1)]
    # Whoever asks again gets nothing of it.
    assert memory.read(2, prompt_ids, "s") == 0
