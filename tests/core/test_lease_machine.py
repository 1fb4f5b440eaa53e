"""The lease table under any sequence of events: what must hold after every one of them."""

from array import array
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from server_ext.core.errors import LeaseLost, TurnConflict
from server_ext.core.gaps import GapModel
from server_ext.core.policy import LeastValueFirst, least_remaining_first
from server_ext.core.rates import ConstantRates
from server_ext.core.records import Lease, Ticket
from server_ext.core.revocation import count_reclaimable

from .fakes import BLOCK_SIZE, FakePool, make_table, verify_references

NUM_BLOCKS = 24
MAX_REQUEST_BLOCKS = 18
MAX_LEASED = 12
MAX_TENANT_LEASED = 9
TURN_TIMEOUT_S = 40

SESSIONS = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "z")]
KEYS = st.sampled_from(SESSIONS)
KEPT = st.sampled_from([0, 7, 16, 60])
TTLS = st.sampled_from([1, 5, 30, 100])


class Tables(RuleBasedStateMachine):
    """A table, a pool, and requests that compute, share and give back blocks beside the leases."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.pool = FakePool(NUM_BLOCKS)
        self.table = make_table(
            self.pool,
            max_request_blocks=MAX_REQUEST_BLOCKS,
            budget_fraction=0.5,
            tenant_share=0.75,
            default_ttl_s=10,
            max_ttl_s=60,
            ticket_ttl_s=15,
            ticket_grace_s=3,
            provisional_ttl_s=4,
            turn_timeout_s=TURN_TIMEOUT_S,
            order=self.make_order(),
        )
        self.now_s = 0.0
        # Blocks held times seconds, by holder, as time passes.
        self.block_seconds: Counter[str] = Counter()
        self.num_begun = 0
        # What was last written into each block: a lease must never outlive its KV.
        self.content: dict[int, list[int]] = {}
        # By nonce: key, prompt. By ticket: its blocks, what they must contain, and when it may end.
        self.turns: dict[str, tuple] = {}
        self.of_old_weights: set[str] = set()
        self.open_tickets: dict[str, tuple] = {}
        self.ticket_id_of: dict[str, str] = {}

    def make_order(self):
        """Return the policy."""
        return least_remaining_first

    def leases(self) -> dict:
        """Return the live leases by key."""
        return {held.key: held for held in self.table.holdings() if isinstance(held, Lease) and not held.is_provisional}

    def compute(self, ids: list[int]) -> list[int] | None:
        """Let a request compute `ids`, sharing full blocks that a lease holds; None where it does not fit."""
        shared: list[int] = []
        for lease in self.leases().values():
            num_equal = 0
            held_ids = lease.token_ids[: lease.num_tokens]
            while num_equal < min(len(ids), len(held_ids)) and ids[num_equal] == held_ids[num_equal]:
                num_equal += 1
            hit = list(lease.block_ids[: num_equal // BLOCK_SIZE])
            shared = max(shared, hit, key=len)
        num_fresh = -(-len(ids) // BLOCK_SIZE) - len(shared)
        # A hit is held before memory is made for the rest, as the engine's retry does it.
        self.pool.take(0, shared=shared)
        num_missing = num_fresh - self.pool.num_free_blocks()
        if num_missing > 0 and self.table.num_reclaimable(now_s=self.now_s, limit=num_missing) >= num_missing:
            self.table.revoke(num_missing, now_s=self.now_s)
        if num_fresh > self.pool.num_free_blocks():
            self.pool.give_back(shared)
            return None
        block_ids = shared + self.pool.take(num_fresh)
        for index, block_id in enumerate(block_ids):
            written = ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            if index < len(shared):
                assert self.content[block_id] == written
            else:
                self.content[block_id] = written
        return block_ids

    # ---------------------------------------------------------------- turns

    def open_nonces(self) -> list[str]:
        """Return the turns that are open as far as the table knows."""
        return [nonce for nonce in self.turns if self.table.is_open(nonce)]

    @rule(
        key=KEYS,
        num_common=st.integers(0, 10),
        num_own=st.integers(1, 30),
        want_ticket=st.booleans(),
        fingerprint=st.sampled_from(["m1", "m1", "m1", "m2"]),
    )
    def begin(self, key, num_common, num_own, want_ticket, fingerprint):
        """Begin a turn and leave it open."""
        self.begin_turn(key, num_common, num_own, want_ticket=want_ticket, fingerprint=fingerprint)

    def begin_turn(self, key, num_common, num_own, *, want_ticket, fingerprint):
        """Begin a turn: all prompts agree for `num_common` tokens, and a session's own ones beyond."""
        own_ids = range(1000 * (SESSIONS.index(key) + 1), 1000 * (SESSIONS.index(key) + 1) + num_own)
        prompt = [*range(num_common), *own_ids]
        before = self.leases().get(key)
        nonce = f"n{self.num_begun}"
        self.num_begun += 1
        try:
            begun = self.table.begin(key, prompt, fingerprint, now_s=self.now_s, want_ticket=want_ticket, nonce=nonce)
        except TurnConflict:
            assert any(k == key and self.table.is_open(n) for n, (k, _) in self.turns.items())
            return None
        self.turns[nonce] = (key, prompt)
        lease = self.leases().get(key)
        if lease is not None and lease is not before:
            assert want_ticket
            assert begun.lease_reason in {"lease_expired", "lease_revoked"}
            assert lease.fingerprint == fingerprint
            self.verify_budgets()
        if begun.held_tokens:
            assert begun.held_tokens == lease.num_tokens
            assert begun.matched_tokens <= min(lease.num_tokens, len(prompt))
            assert lease.fingerprint == fingerprint or begun.matched_tokens == 0
        if begun.ticket is not None:
            assert want_ticket
            assert begun.ticket.num_tokens == begun.matched_tokens > 0
            covered = prompt[: begun.ticket.num_tokens]
            self.ticket_id_of[nonce] = begun.ticket.ticket_id
            self.open_tickets[begun.ticket.ticket_id] = (begun.ticket, covered, self.now_s + 15)
        return nonce

    @precondition(open_nonces)
    @rule(data=st.data(), num_generated=st.integers(0, 6), num_uncomputed=st.integers(0, 2))
    def run_and_finish(self, data, num_generated, num_uncomputed):
        """Run an open turn's request to its end; the last tokens may have no KV yet."""
        self.run(data.draw(st.sampled_from(self.open_nonces())), num_generated, num_uncomputed)

    def run(self, nonce, num_generated, num_uncomputed):
        """Run a turn's request to its end."""
        ids = self.turns[nonce][1] + list(range(500_000, 500_000 + num_generated))
        block_ids = self.compute(ids)
        if block_ids is None:
            assert not self.table.finish(nonce, [], 0, ids, now_s=self.now_s)
            return
        num_tokens = max(0, len(ids) - num_uncomputed)
        is_pinned = self.table.finish(nonce, block_ids, num_tokens, ids, now_s=self.now_s)
        assert self.table.is_open(nonce) or not is_pinned
        assert nonce not in self.of_old_weights or not is_pinned
        assert not self.table.finish(nonce, block_ids, num_tokens, ids, now_s=self.now_s) or not num_tokens
        self.pool.give_back(block_ids)

    @rule(key=KEYS, num_common=st.integers(0, 10), num_own=st.integers(1, 30), num_kept=KEPT, ttl_s=TTLS)
    def whole_turn(self, key, num_common, num_own, num_kept, ttl_s):
        """Run a turn from its beginning to its end, as nearly all turns do."""
        nonce = self.begin_turn(key, num_common, num_own, want_ticket=False, fingerprint="m1")
        if nonce is not None:
            self.run(nonce, 3, 1)
            self.settle(nonce, num_kept, ttl_s)

    @precondition(open_nonces)
    @rule(data=st.data(), num_kept=KEPT, ttl_s=st.none() | TTLS)
    def settle_one(self, data, num_kept, ttl_s):
        """Settle an open turn, with or without a pin."""
        self.settle(data.draw(st.sampled_from(self.open_nonces())), num_kept, ttl_s)

    def settle(self, nonce, num_kept, ttl_s):
        """Settle a turn; afterwards the budgets hold."""
        try:
            info = self.table.settle(nonce, num_kept, ttl_s=ttl_s, now_s=self.now_s)
        except TurnConflict:
            # It timed out, and the sweep of this very call ended it.
            assert not self.table.is_open(nonce)
            return
        assert not self.table.is_open(nonce)
        assert info == self.table.info(self.turns[nonce][0], now_s=self.now_s)
        self.verify_budgets()

    def verify_budgets(self):
        """Verify that no more is leased than the budgets allow."""
        leased = [(key[0], block_id) for key, lease in self.leases().items() for block_id in lease.block_ids]
        assert len({block_id for _, block_id in leased}) <= MAX_LEASED
        per_tenant = Counter(tenant for tenant, _ in set(leased))
        assert all(count <= MAX_TENANT_LEASED for count in per_tenant.values())

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), return_ticket=st.booleans())
    def abandon(self, data, return_ticket):
        """Abandon a turn, open or not; its session's lease is what it was."""
        nonce = data.draw(st.sampled_from(self.open_nonces() or list(self.turns)))
        key = self.turns[nonce][0]
        self.table.sweep(now_s=self.now_s)
        before = self.leases().get(key)
        num_tokens = before.num_tokens if before else None
        was_open = self.table.is_open(nonce)
        assert self.table.abandon(nonce, return_ticket=return_ticket, now_s=self.now_s) == was_open
        after = self.leases().get(key)
        assert after is before
        assert before is None or after.num_tokens == num_tokens
        if was_open and return_ticket:
            self.open_tickets.pop(self.ticket_id_of.get(nonce), None)

    @rule(data=st.data())
    @precondition(lambda self: self.open_tickets)
    def return_ticket(self, data):
        """Return an open ticket, twice."""
        ticket_id = data.draw(st.sampled_from(sorted(self.open_tickets)))
        is_due = self.open_tickets[ticket_id][0].due_s <= self.now_s
        assert self.table.return_ticket(ticket_id, now_s=self.now_s) != is_due
        assert not self.table.return_ticket(ticket_id, now_s=self.now_s)
        del self.open_tickets[ticket_id]

    # ---------------------------------------------------------------- owners

    @rule(key=KEYS, ttl_s=TTLS)
    def extend(self, key, ttl_s):
        """Extend a lease: never shorter than before, never shorter than asked up to the maximum."""
        before = self.table.info(key, now_s=self.now_s)
        try:
            after = self.table.extend(key, ttl_s, now_s=self.now_s)
        except LeaseLost:
            assert before.state != "active"
            return
        assert after.remaining_s >= before.remaining_s
        assert after.remaining_s >= min(ttl_s, 60)

    @rule(key=KEYS)
    def release(self, key):
        """Release a lease, twice."""
        first = self.table.release(key, now_s=self.now_s)
        assert first.state != "active"
        assert self.table.release(key, now_s=self.now_s) == first

    @rule(key=KEYS)
    def forget(self, key):
        """Forget a session."""
        self.table.forget(key, now_s=self.now_s)
        assert self.table.info(key, now_s=self.now_s).reason is None

    def has_open_turn(self, key) -> bool:
        """Return whether a turn of a session is open."""
        return any(k == key and self.table.is_open(nonce) for nonce, (k, _) in self.turns.items())

    @rule(index=st.integers(0, 3), num_tokens=st.integers(0, 30), ttl_s=st.none() | TTLS)
    def fork(self, index, num_tokens, ttl_s):
        """Fork a session: the child holds what it has in common with the parent, the same blocks, at no cost."""
        key, child_key = SESSIONS[index], SESSIONS[index ^ 1]
        self.table.forget(child_key, now_s=self.now_s)
        self.table.sweep(now_s=self.now_s)
        parent = self.leases().get(key)
        before = self.table.info(key, now_s=self.now_s)
        num_leased, num_free = self.table.num_leased_blocks, self.pool.num_free_blocks()
        history = parent.token_ids[:num_tokens] if parent else array("i", [7])
        info = self.table.fork(key, child_key, history, ttl_s=ttl_s, now_s=self.now_s)
        child = self.leases().get(child_key)
        assert self.table.info(key, now_s=self.now_s) == before
        assert (self.table.num_leased_blocks, self.pool.num_free_blocks()) == (num_leased, num_free)
        assert (child is None) == (parent is None)
        if child is None:
            assert (info.state, info.reason) == (before.state, before.reason)
        else:
            assert child.num_tokens == (min(num_tokens, parent.num_tokens) or parent.num_tokens)
            assert list(child.block_ids) == list(parent.block_ids[: len(child.block_ids)])
            assert child.due_s == self.now_s + (parent.ttl_s if ttl_s is None else ttl_s)

    @rule(key=KEYS, num_tokens=st.integers(0, 30))
    def rewind(self, key, num_tokens):
        """Rewind a session: its lease ends where its new history does, and never grows."""
        self.table.sweep(now_s=self.now_s)
        lease = self.leases().get(key)
        if lease is None or self.has_open_turn(key):
            return
        before = lease.num_tokens
        after = self.table.rewind(key, lease.token_ids[:num_tokens], now_s=self.now_s)
        assert after.num_tokens == (min(num_tokens, before) or before)

    # ---------------------------------------------------------------- the engine

    @rule(num_blocks=st.integers(0, NUM_BLOCKS), all_or_nothing=st.booleans())
    def revoke(self, num_blocks, all_or_nothing):
        """Revoke: exactly as many blocks become free as were asked for and could be, or none."""
        self.table.sweep(now_s=self.now_s)
        num_reclaimable = self.table.num_reclaimable(now_s=self.now_s)
        before = {key: list(lease.block_ids) for key, lease in self.leases().items()}
        num_free = self.pool.num_free_blocks()
        num_freed = self.table.revoke(num_blocks, now_s=self.now_s, all_or_nothing=all_or_nothing)
        is_vain = all_or_nothing and num_reclaimable < num_blocks
        assert num_freed == (0 if is_vain else min(num_blocks, num_reclaimable))
        assert self.pool.num_free_blocks() == num_free + num_freed
        for key, block_ids in before.items():
            after = self.leases().get(key)
            kept = list(after.block_ids) if after else []
            assert block_ids[: len(kept)] == kept
            # The first block that was taken was freed: no lease was clipped in vain.
            assert kept == block_ids or self.pool.num_references(block_ids[len(kept)]) == 0

    @rule(reason=st.sampled_from(["reset", "model_changed"]))
    def release_all(self, reason):
        """Release everything but the open tickets."""
        self.table.sweep(now_s=self.now_s)
        tickets = [holding for holding in self.table.holdings() if isinstance(holding, Ticket)]
        assert self.table.has_tickets(now_s=self.now_s) == bool(tickets)
        self.table.release_all(reason, now_s=self.now_s)
        assert list(self.table.holdings()) == tickets
        if reason == "model_changed":
            self.of_old_weights.update(self.open_nonces())

    @rule(target=requests, num_blocks=st.integers(1, 6))
    def start_request(self, num_blocks):
        """Let a request of nobody's session take blocks and write into them."""
        if num_blocks > self.pool.num_free_blocks():
            return multiple()
        block_ids = self.pool.take(num_blocks)
        self.content.update((block_id, [-1]) for block_id in block_ids)
        return block_ids

    @rule(block_ids=consumes(requests))
    def end_request(self, block_ids):
        """Let such a request end."""
        self.pool.give_back(block_ids)

    @rule(seconds=st.sampled_from([0.5, 2, 5, 20, 61]))
    def advance(self, seconds):
        """Let time pass, without a sweep."""
        held = defaultdict(set)
        for holding in self.table.holdings():
            is_lease = isinstance(holding, Lease)
            holder = "ticket" if not is_lease else "provisional" if holding.is_provisional else "lease"
            # A provisional pin is one turn's own.
            held[holder].update((id(holding) if holder == "provisional" else 0, b) for b in holding.block_ids)
        for holder, blocks in held.items():
            self.block_seconds[holder] += len(blocks) * seconds
        self.now_s += seconds

    @rule()
    def sweep(self):
        """Sweep: nothing that is due is left after one."""
        self.table.sweep(now_s=self.now_s)
        assert self.table.sweep(now_s=self.now_s) == 0
        running = {key for nonce, (key, _) in self.turns.items() if self.table.is_open(nonce)}
        for held in self.table.holdings():
            is_kept_by_turn = isinstance(held, Lease) and not held.is_provisional and held.key in running
            assert held.due_s > self.now_s or is_kept_by_turn

    @rule()
    def scrape(self):
        """Read the metrics: blocks by state and byte-seconds are those of what was held, exactly."""
        snapshot = self.table.snapshot(now_s=self.now_s, block_bytes=2)
        pinned = {labels[0]: value for labels, value in snapshot["bidikv_pinned_byte_seconds_total"]}
        assert pinned == pytest.approx({holder: 2 * self.block_seconds[holder] for holder in pinned})
        leased = {block_id for lease in self.leases().values() for block_id in lease.block_ids}
        blocks = {labels[0]: value for labels, value in snapshot["bidikv_blocks"]}
        assert blocks["leased"] == len(leased)
        assert blocks["free"] == self.pool.num_free_blocks()
        leases = {labels[0]: value for labels, value in snapshot["bidikv_leases"]}
        assert leases["idle"] + leases["running"] == len(self.leases())

    # ---------------------------------------------------------------- what always holds

    @invariant()
    def references_are_what_is_held(self):
        """Pins are the multiset of live leases, provisional pins and open tickets; nothing more or less."""
        verify_references(self.table, self.pool)

    @invariant()
    def counts_are_what_is_held(self):
        """The counts that budgets and revocation rest on agree with the records."""
        leased = {block_id for lease in self.leases().values() for block_id in lease.block_ids}
        assert self.table.num_leased_blocks == len(leased)

    @invariant()
    def reclaimable_is_what_only_leases_hold(self):
        """Reclaimable are the blocks whose references are all of leases and pins."""
        ours = Counter(b for held in self.table.holdings() if isinstance(held, Lease) for b in held.block_ids)
        expected = sum(self.pool.num_references(block_id) == count for block_id, count in ours.items())
        # The pure question, for the verb would sweep, and an invariant must not act.
        leases = [held for held in self.table.holdings() if isinstance(held, Lease)]
        assert count_reclaimable(leases, self.pool.num_references) == expected

    @invariant()
    def a_lease_holds_the_kv_that_it_says(self):
        """The tokens of a lease are what was last written into its blocks, in as many blocks as they need."""
        for held in self.table.holdings():
            if isinstance(held, Lease):
                written = [token_id for block_id in held.block_ids for token_id in self.content[block_id]]
                assert list(held.token_ids[: held.num_tokens]) == written[: held.num_tokens]
                assert len(held.block_ids) == -(-held.num_tokens // BLOCK_SIZE)

    @invariant()
    def nothing_is_freed_under_an_open_ticket(self):
        """Until it is returned or its deadline and grace are over, a ticket's blocks hold what it was for."""
        held = {holding.ticket_id for holding in self.table.holdings() if isinstance(holding, Ticket)}
        for ticket_id, (ticket, covered, deadline_s) in list(self.open_tickets.items()):
            if ticket_id not in held:
                assert self.now_s >= deadline_s + 3
                del self.open_tickets[ticket_id]
                continue
            written = [token_id for block_id in ticket.block_ids for token_id in self.content[block_id]]
            assert written[: len(covered)] == covered
        ticketed = {b for holding in self.table.holdings() if isinstance(holding, Ticket) for b in holding.block_ids}
        assert len(ticketed) <= NUM_BLOCKS - MAX_REQUEST_BLOCKS

    def teardown(self):
        """End everything: the pool is as it was in the beginning."""
        for nonce in self.turns:
            self.table.abandon(nonce, return_ticket=True, now_s=self.now_s)
        for key in SESSIONS:
            self.table.forget(key, now_s=self.now_s)
        for ticket_id in self.open_tickets:
            self.table.return_ticket(ticket_id, now_s=self.now_s)
        assert list(self.table.holdings()) == []
        assert not self.pool.pinned()
        assert self.table.num_leased_blocks == 0


class TablesByValue(Tables):
    """The same with the policy that asks what a lease is worth; its habits are the priors."""

    def make_order(self):
        """Return the policy."""
        gaps = GapModel()
        for index, key in enumerate(SESSIONS):
            gaps.ended(key, "tool:x" if index % 2 else "stop", now_s=0)
        return LeastValueFirst(gaps, ConstantRates(), self.pool.num_references, block_size=BLOCK_SIZE)


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTablesByValue = TablesByValue.TestCase
TestTablesByValue.settings = settings(TestTables.settings, max_examples=60)
