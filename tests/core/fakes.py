"""A block pool in memory that counts references as an engine's does, and the builders of the core's tests."""

import itertools
from array import array
from collections import Counter, OrderedDict

from server_ext.core.home import Home
from server_ext.core.leases import LeaseTable
from server_ext.core.policy import least_remaining_first
from server_ext.core.ports import BlockPins
from server_ext.core.settings import HomeSettings

BLOCK_SIZE = 4
SECRET = b"a shared secret"
ALICE = ("tenant-a", "alice")
BOB = ("tenant-b", "bob")


class FakePool(BlockPins):
    """A pool of counted references, with requests that take and give back blocks beside the pins.

    Blocks that become free queue for reuse: `take` hands out the longest free first.
    """

    def __init__(self, num_blocks: int = 64) -> None:
        self.num_blocks = num_blocks
        self.references: Counter[int] = Counter()
        self.request_references: Counter[int] = Counter()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.seal: dict[int, object] = {}

    def pin(self, block_ids) -> None:
        """Take a reference on each block."""
        for block_id in block_ids:
            assert 0 <= block_id < self.num_blocks
            self.free.pop(block_id, None)
            self.references[block_id] += 1

    def unpin(self, block_ids) -> None:
        """Give back a reference on each block, which must be held."""
        for block_id in block_ids:
            assert self.references[block_id] > 0, f"block {block_id} is freed twice"
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.free[block_id] = None

    def num_references(self, block_id: int) -> int:
        """Return all references on a block."""
        return self.references[block_id]

    def seals(self, block_ids) -> list[object | None]:
        """Return the seals of blocks: each request that writes into one makes a new one."""
        return [self.seal.get(block_id) for block_id in block_ids]

    def num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return len(self.free)

    def num_total_blocks(self) -> int:
        """Return the number of blocks."""
        return self.num_blocks

    def take(self, num_blocks: int, *, shared=()) -> list[int]:
        """Let a request hold `shared` blocks and `num_blocks` free ones; return them in this order."""
        fresh = list(itertools.islice(self.free, num_blocks))
        assert len(fresh) == num_blocks, "the pool is too small for this test"
        self.seal.update((block_id, object()) for block_id in fresh)
        block_ids = [*shared, *fresh]
        self.pin(block_ids)
        self.request_references.update(block_ids)
        return block_ids

    def give_back(self, block_ids) -> None:
        """Let a request that holds these blocks end."""
        self.request_references.subtract(block_ids)
        self.unpin(reversed(block_ids))

    def pinned(self) -> Counter[int]:
        """Return the references that no request holds."""
        return +(self.references - self.request_references)


def make_settings(**changes) -> HomeSettings:
    """Return settings that let a small pool be leased whole, with tickets for any number of tokens."""
    return HomeSettings(**{"budget_fraction": 1.0, "min_fetch_tokens": 1} | changes)


def make_table(pool: FakePool, *, max_request_blocks: int = 8, order=least_remaining_first, **changes) -> LeaseTable:
    """Return a table over `pool` whose ticket ids are t0, t1 and so on."""
    return LeaseTable(
        pool,
        make_settings(**changes),
        block_size=BLOCK_SIZE,
        max_request_blocks=max_request_blocks,
        new_ticket_id=map("t{}".format, itertools.count()).__next__,
        order=order,
    )


def make_home(
    pool: FakePool,
    *,
    max_request_blocks: int = 8,
    incarnation: str = "life-1",
    make_address=None,
    block_bytes: int = 0,
    rates=None,
    count_running=lambda: 0,
    **changes,
) -> Home:
    """Return a home over `pool` whose nonces are n0, n1 and so on."""
    return Home(
        pool,
        make_settings(**changes),
        block_size=BLOCK_SIZE,
        max_request_blocks=max_request_blocks,
        incarnation=incarnation,
        secret=SECRET,
        make_address=make_address or address_until,
        new_nonce=map("n{}".format, itertools.count()).__next__,
        block_bytes=block_bytes,
        rates=rates,
        count_running=count_running,
    )


def address_until(deadline_s: float) -> dict:
    """Return the transport's part of a ticket."""
    return {
        "remote_engine_id": "engine-d",
        "remote_host": "d.example",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_blocks_expiry_time": deadline_s,
        "bidikv_ttl_s": 60.0,
    }


def some_ids(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return token ids that differ between seeds at every index."""
    return [seed * 100_000 + i for i in range(num_tokens)]


def packed(token_ids) -> bytes:
    """Return token ids as the control channel carries them."""
    return array("i", token_ids).tobytes()


def run_turn(
    table: LeaseTable,
    pool: FakePool,
    key,
    token_ids,
    *,
    now_s: float,
    nonce: str,
    num_kept: int | None = None,
    ttl_s: float | None = None,
    shared=(),
    fingerprint: str = "model-1",
):
    """Run one whole turn whose request computes `token_ids`; return the lease's info."""
    table.begin(key, token_ids, fingerprint, now_s=now_s, want_ticket=False, nonce=nonce)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    block_ids = pool.take(num_blocks - len(shared), shared=shared)
    assert table.finish(nonce, block_ids, len(token_ids), token_ids, now_s=now_s)
    pool.give_back(block_ids)
    kept = len(token_ids) if num_kept is None else num_kept
    return table.settle(nonce, kept, ttl_s=ttl_s, now_s=now_s)


def blocks_of(table: LeaseTable, key) -> list[int]:
    """Return the blocks of a session's lease, [] without one."""
    for held in table.holdings():
        if getattr(held, "key", None) == key and not held.is_provisional:
            return list(held.block_ids)
    return []


def verify_references(table: LeaseTable, pool: FakePool) -> None:
    """Verify that what is pinned is exactly what leases, provisional pins and open tickets say."""
    held: Counter[int] = Counter()
    for holding in table.holdings():
        held.update(holding.block_ids)
    assert pool.pinned() == held
