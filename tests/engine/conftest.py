"""Five stacks for the whole suite, one alive at a time, and after every test both engines at rest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .common import eventually
from .rig import Plan, Rig, Stacks

ALICE, BOB = "key-of-alice", "key-of-bob"

PLANS = {
    # Tickets outlast what a test does with them by little, so that one which nobody returns is soon back.
    "plain": Plan(
        settings={
            "budget_fraction": 1.0,
            "ticket_ttl_s": 12.0,
            "ticket_grace_s": 0.5,
            "prefill_timeout_s": 8.0,
            "provisional_ttl_s": 3.0,
            "default_ttl_s": 600.0,
        },
        gated=True,
    ),
    # Readers keep 5 s in hand, so every ticket of this stack is too late.
    "two_tenants": Plan(
        settings={"budget_fraction": 0.2, "ticket_ttl_s": 4.0, "ticket_grace_s": 0.5},
        api_keys=(ALICE, BOB),
    ),
    # Room for long histories, and for tickets on them beside the longest request.
    "wide": Plan(
        settings={"budget_fraction": 1.0, "default_ttl_s": 600.0, "default_route": "fetch"},
        max_model_len=4096,
        pool_blocks=383,
        prefill_step_tokens=256,
    ),
    # P keeps what it computes, sessions soon reach their budget, and whoever ends leaves a copy of its KV cache.
    **{
        f"blocks_of_{block_size}": Plan(
            settings={"budget_fraction": 0.2, "default_ttl_s": 600.0},
            max_model_len=1280,
            pool_blocks=3072 // block_size - 1,
            prefill_step_tokens=512,
            block_size=block_size,
            copied=True,
            fresh_prefill_salt=False,
        )
        for block_size in (32, 64)
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs engines, so that the rest can be run without, and let each stack start once."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("engine")
    items.sort(key=_stack_of)


def _stack_of(item: pytest.Item) -> tuple[int, int]:
    fixtures = getattr(item, "fixturenames", ())
    index = next((index for index, name in enumerate(("keyed", "wide", "clinic", "drawn"), 1) if name in fixtures), 0)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return index, params.get("block_size", 0)


@pytest.fixture
def anyio_backend() -> str:
    """The SDK's background task is asyncio's."""
    return "asyncio"


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """All stacks of the suite."""
    running = Stacks(tmp_path_factory.mktemp("stacks"), PLANS)
    yield running
    running.stop()


def _use(stacks: Stacks, name: str) -> Iterator[Rig]:
    rig = stacks.get(name)
    yield rig
    rig.repair()
    rig.end_sessions()
    eventually(rig.is_at_rest, "both engines at rest, with all blocks free")


@pytest.fixture
def rig(stacks: Stacks) -> Iterator[Rig]:
    """A stack without keys: one tenant, all of the pool for leases."""
    yield from _use(stacks, "plain")


@pytest.fixture
def keyed(stacks: Stacks) -> Iterator[Rig]:
    """A stack of two tenants, a small budget, and tickets that are always too late."""
    yield from _use(stacks, "two_tenants")


@pytest.fixture
def wide(stacks: Stacks) -> Iterator[Rig]:
    """A stack for long histories, without a gate."""
    yield from _use(stacks, "wide")


@pytest.fixture
def drawn(stacks: Stacks, block_size: int) -> Iterator[Rig]:
    """A stack of either block size whose engines leave copies of their KV cache."""
    yield from _use(stacks, f"blocks_of_{block_size}")
