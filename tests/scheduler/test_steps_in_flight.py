"""What a GPU engine does and a CPU engine cannot: steps in flight, frees that wait for them, drafts that are rejected.

A lease counts what is certainly written, and nothing that a step in flight may still write is ever given away.
"""

import pytest
from vllm.v1.request import RequestStatus

from server_ext.engine.decode import num_tokens_in_cache

from .harness import BLOCK_SIZE, STOP_ID, handover_to, ids, ticket_for

PROMPT = ids(2 * BLOCK_SIZE - 3)


def begin(d, prompt_ids=PROMPT, **options):
    """Begin a turn and add its request."""
    begun = d.begin(prompt_ids)
    return begun, d.add("r", prompt_ids, session_id=begun["nonce"], **options)


def lease_of(d, session_id="s"):
    """Return a session's lease."""
    return d.control("get", session_id=session_id)["info"]["lease"]


# ---------------------------------------------------------------- async scheduling


def test_an_abort_while_a_step_is_in_flight(make_harness):
    """A stop string is found while the next step runs already; the lease ends before what that step writes."""
    d = make_harness("decode", num_blocks=20, is_async=True)
    begun, request = begin(d)
    first, second = d.step(), d.step()
    d.answer(first)
    third = d.step()
    d.answer(second)
    assert (request.num_output_tokens, request.num_computed_tokens) == (2, len(PROMPT) + 2)
    d.abort(request)
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == len(PROMPT) + 1
    d.answer(third)
    assert d.num_free == 20 - info["lease"]["num_blocks"]


def test_a_preempted_turn_that_is_aborted_leases_nothing(make_harness):
    """A request that has lost its blocks keeps the lease before it, whatever is still in flight."""
    d = make_harness("decode", num_blocks=20, is_async=True)
    d.lease(PROMPT[:40], "s")
    before = lease_of(d)
    begun = d.begin(PROMPT, turn=2)
    request = d.add("r", PROMPT, session_id=begun["nonce"])
    first = d.step()
    d.answer(first)
    second = d.step()
    # What stock vLLM does where no block is left for a running request.
    d.scheduler.running.remove(request)
    d.scheduler._preempt_request(request, 0.0)  # noqa: SLF001 - the one way to it is a pool that is full of requests
    d.answer(second)
    d.abort(request)
    info = d.settle(begun, request.all_token_ids)
    assert {**info["lease"], "reason": None, "remaining_s": 0} == {**before, "remaining_s": 0}
    assert d.num_free == 20 - before["num_blocks"]


# ---------------------------------------------------------------- frees that wait


def test_blocks_wait_for_the_step_in_flight(make_harness):
    """Revoking a lease cannot hand out a block that a step in flight still writes; behind that step it can."""
    d = make_harness("decode", num_blocks=20, is_async=True, budget_fraction=1.0)
    assert d.scheduler.defer_block_free
    begun, request = begin(d, ids(2 * BLOCK_SIZE - 1))
    first, second = d.step(), d.step()
    d.answer(first)
    third = d.step()
    d.answer(second, STOP_ID)
    assert request.is_finished()
    d.settle(begun, request.all_token_ids)
    assert len(d.scheduler.deferred_frees) == 1
    held = lease_of(d)["num_blocks"]
    num_waiting = 20 - d.num_free
    assert (held, num_waiting) == (2, 3)  # the third block is only the step's in flight
    # A request that needs all the rest and the lease: nothing can be gained yet.
    live = d.add("live", ids(16 * BLOCK_SIZE - 1, 50_000), max_tokens=1)
    more = d.add("more", ids(3 * BLOCK_SIZE - 1, 70_000), max_tokens=1)
    step = d.step()
    assert set(step.num_scheduled_tokens) == {live.request_id}
    assert lease_of(d)["num_blocks"] == held
    d.answer(third)
    assert not d.scheduler.deferred_frees
    step_2 = d.step()
    assert set(step_2.num_scheduled_tokens) == {more.request_id}
    assert lease_of(d)["num_blocks"] == 1
    d.answer(step)
    d.answer(step_2)
    d.control("release", session_id="s")
    d.answer(d.step())
    assert d.num_free == 20


def test_a_running_request_takes_a_leased_block_with_a_step_in_flight(make_harness):
    """A step is scheduled before the last one is answered, and a decode that needs a block gets it all the same."""
    d = make_harness("decode", num_blocks=6, is_async=True, budget_fraction=1.0)
    d.lease(ids(4 * BLOCK_SIZE - 2), "s")
    live = d.add("live", ids(2 * BLOCK_SIZE - 1, 50_000), max_tokens=8)
    in_flight = d.step()
    while not live.is_finished():
        following = d.step()
        d.answer(in_flight)
        in_flight = following
    d.answer(in_flight)
    assert (live.num_preemptions, live.num_output_tokens) == (0, 8)
    lease = lease_of(d)
    assert (lease["state"], lease["num_blocks"], lease["reason"]) == ("active", 3, "lease_revoked")
    assert d.num_free == 6 - 3


def test_a_release_behind_the_last_step_frees_all(make_harness):
    """Pins and deferred frees are counted apart: whoever lets go last, every block comes back once."""
    d = make_harness("decode", num_blocks=20, is_async=True)
    begun, request = begin(d)
    first, second = d.step(), d.step()
    d.answer(first)
    third = d.step()
    d.answer(second, STOP_ID)
    d.settle(begun, request.all_token_ids)
    d.control("release", session_id="s")
    assert d.num_free < 20
    d.answer(third)
    assert d.num_free == 20


# ---------------------------------------------------------------- reads that are under way


def test_a_read_from_p_under_async_scheduling(make_harness):
    """D reads from P while its next steps are scheduled: the lease counts the prompt when it is there, not before."""
    d = make_harness("decode", num_blocks=20, is_async=True)
    begun, request = begin(d, transfer=handover_to(d))
    first = d.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == len(PROMPT)
    assert not d.step().num_scheduled_tokens
    d.answer(first, finished_recving={"r"})
    second, third = d.step(), d.step()
    d.answer(second, STOP_ID)
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == len(PROMPT)
    d.answer(third)
    assert d.num_free == 20 - 2


def test_an_abort_during_a_read_waits_for_its_end(make_harness):
    """A turn that ends while D reads from P leases nothing, and its blocks wait until NIXL writes no more."""
    d = make_harness("decode", num_blocks=20, is_async=True)
    begun, request = begin(d, transfer=handover_to(d))
    step = d.step()
    d.abort(request)
    assert d.settle(begun, PROMPT)["lease"]["num_blocks"] == 0
    assert d.num_free < 20
    d.answer(step, finished_recving={"r"})
    assert d.num_free == 20


@pytest.mark.parametrize(
    ("fails", "num_computed", "report"),
    [(False, len(PROMPT) - 40, (0, 40, None)), (True, len(PROMPT), (0, 0, "read_failed"))],
    ids=["read", "failed"],
)
def test_p_reads_a_ticket_under_async_scheduling(make_harness, fails, num_computed, report):
    """A reader with steps in flight loads the ticket's tokens, computes the rest, and gives every block back."""
    p = make_harness("prefill", num_blocks=20, is_async=True)
    assert p.scheduler.defer_block_free
    other = p.add("other", ids(40, 9000), max_tokens=3)
    request = p.add("r", PROMPT, max_tokens=1, transfer=ticket_for(p, PROMPT, 40))
    first, second = p.step(), p.step()
    assert "r" not in first.num_scheduled_tokens
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    p.answer(first, finished_recving={"r"}, **({"failed_recving": {"r"}} if fails else {}))
    third = p.step()
    assert third.num_scheduled_tokens["r"] == num_computed
    p.answer(second)
    (told,) = [output for output in p.answer(third) if output.request_id == "r"]
    assert request.is_finished()
    assert request.num_output_tokens == 1
    said = told.kv_transfer_params["bidikv"]
    assert (said["local_tokens"], said["fetched_tokens"], said["reason"]) == report
    p.run(other)
    assert p.num_free == 20 - 2  # what the prompt takes, until D has read it
    p.answer(p.step(), finished_sending={"r"})
    assert p.num_free == 20


# ---------------------------------------------------------------- speculative decoding


@pytest.mark.parametrize(
    ("sampled", "num_written"),
    [([11], 1), ([11, 12], 2), ([11, 12, 13], 3), ([11, 12, 13, 14], 4)],
    ids=["no draft", "one draft", "two drafts", "all drafts"],
)
def test_a_rejected_draft_is_not_leased(make_harness, sampled, num_written):
    """Of a step with three drafts the lease gets the token before them and those that were accepted."""
    d = make_harness("decode", num_blocks=20, num_spec_tokens=3)
    begun, request = begin(d)
    d.answer(d.step(), 10)
    d.draft(request, [11, 12, 13])
    step = d.step()
    assert step.scheduled_spec_decode_tokens == {"r": [11, 12, 13]}
    d.answer(step, sampled={"r": sampled})
    d.abort(request)
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == len(PROMPT) + num_written
    assert info["lease"]["num_blocks"] == -(-info["lease"]["num_tokens"] // BLOCK_SIZE)
    assert d.num_free == 20 - info["lease"]["num_blocks"]


def test_drafts_that_were_not_scheduled_yet_are_not_leased(make_harness):
    """What a drafter has proposed is no token of the answer."""
    d = make_harness("decode", num_blocks=20, num_spec_tokens=3)
    begun, request = begin(d)
    d.answer(d.step(), 10)
    d.draft(request, [11, 12, 13])
    d.abort(request)
    assert d.settle(begun, request.all_token_ids)["lease"]["num_tokens"] == len(PROMPT)


def test_an_answer_that_ends_within_accepted_drafts(make_harness):
    """Tokens behind the end of turn were computed and accepted, but are none of the answer."""
    d = make_harness("decode", num_blocks=20, num_spec_tokens=3)
    begun, request = begin(d)
    d.answer(d.step(), 10)
    d.draft(request, [11, STOP_ID, 13])
    d.answer(d.step(), sampled={"r": [11, STOP_ID, 13, 14]})
    assert (request.status, request.num_computed_tokens) == (RequestStatus.FINISHED_STOPPED, len(PROMPT) + 4)
    assert list(request.output_token_ids) == [10, 11, STOP_ID]
    assert num_tokens_in_cache(request) == len(PROMPT) + 3
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == len(PROMPT) + 3


@pytest.mark.parametrize("num_accepted", range(4))
def test_placeholders_of_drafts_in_flight_are_not_leased(make_harness, num_accepted):
    """With drafts and steps in flight together, rejected ones and those of the step in flight are both left out."""
    d = make_harness("decode", num_blocks=20, is_async=True, num_spec_tokens=3)
    begun, request = begin(d)
    d.answer(d.step(), 10)
    second = d.step()
    assert second.scheduled_spec_decode_tokens == {"r": [-1, -1, -1]}
    third = d.step()
    d.answer(second, sampled={"r": [11, 12, 13, 14][: num_accepted + 1]})
    assert request.num_computed_tokens - request.num_in_flight_tokens == len(PROMPT) + 1 + num_accepted
    assert request.num_in_flight_tokens == 4
    d.abort(request)
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == len(PROMPT) + 1 + num_accepted
    d.answer(third, sampled={"r": [15]})
    assert d.num_free == 20 - info["lease"]["num_blocks"]
