"""P reads from D while D reads from P, and both are full: whatever ends first, everything goes on and comes back."""

import pytest
from vllm.v1.request import RequestStatus

from server_ext.core.tickets import sign
from server_ext.engine.notes import ReadTickets

from .harness import BLOCK_SIZE, SECRET, ids, ticket_for

NUM_BLOCKS = 20
PROMPT = ids(3 * BLOCK_SIZE)
FOR_D = sign({"do_remote_decode": True, "do_remote_prefill": False}, SECRET)


@pytest.fixture
def p(make_harness):
    """A scheduler of P."""
    return make_harness("prefill", num_blocks=NUM_BLOCKS)


# What happens, and how many blocks are held behind it: 2 that P's read writes into, and 3 that D reads.
ORDERS = {
    "abort, read, handover": [("abort", 5), ("read", 3), ("handover", 0)],
    "abort, handover, read": [("abort", 5), ("handover", 2), ("read", 0)],
    "abort, both": [("abort", 5), ("both", 0)],
    "read, abort, handover": [("read", 5), ("abort", 3), ("handover", 0)],
    "handover, abort, read": [("handover", 2), ("abort", 2), ("read", 0)],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_abort_while_both_ways_are_under_way(p, order):
    """Of two prompts one is aborted while P reads for it, and D reads what P has computed for the other."""
    handed = p.add("handed", ids(3 * BLOCK_SIZE, 5000), max_tokens=1, transfer=FOR_D)
    p.run(handed)
    reading = p.add("reading", PROMPT, max_tokens=1, transfer=ticket_for(p, PROMPT, 2 * BLOCK_SIZE))
    p.answer(p.step())
    assert reading.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    ends = {
        "read": {"finished_recving": {"reading"}},
        "handover": {"finished_sending": {"handed"}},
        "both": {"finished_recving": {"reading"}, "finished_sending": {"handed"}},
    }
    for event, num_held in order:
        if event == "abort":
            p.abort(reading)
            p.abort(handed)  # it has ended long since, and only D's read is left
        else:
            p.answer(p.step(), **ends[event])
        assert p.num_free == NUM_BLOCKS - num_held
    p.run(p.add("after", PROMPT, max_tokens=1))
    assert p.num_free == NUM_BLOCKS


@pytest.mark.parametrize("fails", [False, True], ids=["read", "failed"])
def test_everything_goes_on_where_both_are_full(make_harness, fails):
    """D is full of leases and P of reads that have not ended: D serves its longest request, and each prompt is done."""
    d = make_harness("decode", num_blocks=24, budget_fraction=1.0, min_fetch_tokens=0)
    p = make_harness("prefill", num_blocks=10)
    prompts = {f"s{i}": ids(4 * BLOCK_SIZE + 10, 1000 * i) for i in range(6)}
    for name, prompt in prompts.items():
        d.lease(prompt[: 4 * BLOCK_SIZE - 2], name)
    assert d.num_free == 0
    begun = {name: d.begin(prompt, turn=2, session_id=name, want_ticket=True) for name, prompt in prompts.items()}
    # Two of them get tickets: the others would leave too little for the longest request.
    assert [name for name in begun if begun[name]["ticket"] is not None] == ["s0", "s1"]
    requests = {
        name: p.add(name, prompts[name], max_tokens=1, transfer=begun[name]["ticket"] or FOR_D) for name in prompts
    }
    p.answer(p.step())
    reading = {name for name, r in requests.items() if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
    assert reading == {"s0", "s1"}
    d.add("longest", ids(16 * BLOCK_SIZE - 1, 50_000), max_tokens=1)
    step = d.step()
    assert step.num_scheduled_tokens == {"longest": 16 * BLOCK_SIZE - 1}
    blocks = {b for name in reading for b in p.scheduler.kv_cache_manager.get_block_ids(name)[0]} if fails else set()
    told = {"finished_recving": reading, **({"invalid_block_ids": blocks} if fails else {})}
    sent = set()
    for _ in range(20):
        p.answer(p.step(), **told)
        done = {name for name, request in requests.items() if request.is_finished()}
        told, sent = {"finished_sending": done - sent}, done
    assert sent == set(prompts)
    assert p.num_free == 10
    notes = ReadTickets(frozenset(begun[name]["ticket_id"] for name in reading))
    d.answer(step, kv_connector_worker_meta=notes)
    assert d.control("get", session_id="s0")["info"]["pool"]["pending_ticket_blocks"] == 0
