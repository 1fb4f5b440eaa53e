"""D's connector in vLLM's schedulers: what a lease holds, and that live requests win over it."""

import pytest
from vllm.v1.request import RequestStatus

from .harness import BLOCK_SIZE, STOP_ID, handover_to, ids


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_lease_never_counts_a_step_that_is_still_in_flight(make_harness, is_async):
    """At the end of a turn only tokens whose KV was certainly written are leased."""
    d = make_harness("decode", num_blocks=20, is_async=is_async)
    begun = d.begin(ids(40))
    request = d.add("r", ids(40), session_id=begun["nonce"])
    first = d.step()
    if is_async:  # the next step is scheduled before the one before it is answered
        second = d.step()
        d.answer(first)
        third = d.step()
        d.answer(second, STOP_ID)
        assert request.num_computed_tokens == 42  # what vLLM says includes the third step
        assert third.num_scheduled_tokens
    else:
        d.answer(first)
        d.answer(d.step(), STOP_ID)
    assert request.status == RequestStatus.FINISHED_STOPPED
    info = d.settle(begun, request.all_token_ids)
    assert info["lease"]["num_tokens"] == 41  # the prompt and the first token; the stop token was never fed back
    if is_async:
        d.answer(third)
    assert d.num_free == 20 - 2


def test_a_stop_string_is_an_abort_and_still_leased(make_harness):
    """The engine sees an abort where the API server found a stop string; the conductor settles what it kept."""
    d = make_harness("decode", num_blocks=20)
    begun = d.begin(ids(40))
    request = d.add("r", ids(40), session_id=begun["nonce"])
    for _ in range(4):
        d.answer(d.step())
    d.abort(request)
    info = d.settle(begun, list(request.all_token_ids)[:42])
    assert (info["lease"]["state"], info["lease"]["num_tokens"]) == ("active", 42)


def test_an_abort_before_the_first_token_leases_nothing(make_harness):
    """While P's blocks are still on their way, nothing is certain."""
    d = make_harness("decode", num_blocks=20)
    begun = d.begin(ids(40))
    request = d.add("r", ids(40), session_id=begun["nonce"], transfer=handover_to(d))
    d.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    d.abort(request)
    assert d.settle(begun, ids(40))["lease"]["num_blocks"] == 0


def test_a_read_from_p_that_fails_is_computed_on_d(make_harness):
    """D does not wait for ever either: what it could not read it computes, and leases as usual."""
    d = make_harness("decode", num_blocks=20)
    begun = d.begin(ids(40))
    request = d.add("r", ids(40), session_id=begun["nonce"], transfer=handover_to(d), max_tokens=2)
    step = d.step()
    (blocks,) = d.scheduler.kv_cache_manager.get_block_ids("r")
    d.answer(step, finished_recving={"r"}, invalid_block_ids=set(blocks))
    d.run(request)
    assert d.settle(begun, list(request.all_token_ids))["lease"]["num_tokens"] == 41


@pytest.mark.parametrize("num_cached", [0, BLOCK_SIZE], ids=["nothing", "a block"])
@pytest.mark.parametrize("fails", [False, True], ids=["read", "failed"])
def test_vllm_tells_what_d_has_read(make_harness, num_cached, fails):
    """With the first token comes how much of the prompt was there: all of it, or, where the read failed, D's own part.

    The conductor's report relies on it.
    """
    d = make_harness("decode", num_blocks=20)
    if num_cached:
        d.run(d.add("before", ids(num_cached + 1), max_tokens=1))
    d.add("r", ids(40), transfer=handover_to(d), max_tokens=2)
    step = d.step()
    (blocks,) = d.scheduler.kv_cache_manager.get_block_ids("r")
    unread = set(blocks[num_cached // BLOCK_SIZE :])
    d.answer(step, finished_recving={"r"}, **({"failed_recving": {"r"}, "invalid_block_ids": unread} if fails else {}))
    (output,) = d.answer(d.step())
    assert output.prefill_stats.num_cached_tokens == (num_cached if fails else 40)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_p_computed_under_other_weights_is_not_read(make_harness, is_async):
    """New weights come between P's answer and D's read: D computes, and lets P know that it needs nothing."""
    d = make_harness("decode", num_blocks=20, is_async=is_async)
    request = d.add("r", ids(40), transfer=handover_to(d), max_tokens=1)
    d.scheduler.connector.connector_scheduler.on_weight_version("after training")
    step = d.step()
    assert step.num_scheduled_tokens == {"r": 40}
    (told,) = step.kv_connector_metadata.reqs_to_recv.values()
    assert not any(told.local_block_ids)
    d.answer(step)
    assert request.num_output_tokens == 1


def test_parameters_that_nobody_signed_are_ignored(make_harness):
    """A client's own transfer parameters never make D read from anywhere."""
    d = make_harness("decode", num_blocks=20)
    forged = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p", "remote_host": "evil"}
    request = d.add("r", ids(40), transfer={**forged, "bidikv_mac": "0" * 64})
    d.answer(d.step())
    assert request.kv_transfer_params is None
    assert request.num_output_tokens == 1


def test_a_session_id_of_a_client_reaches_no_lease(make_harness):
    """Only a turn's nonce is known to the home; the session's public id is not, also while a turn is open."""
    d = make_harness("decode", num_blocks=20)
    before = d.lease(ids(40), "s")
    begun = d.begin(ids(50), turn=2)
    d.run(d.add("r", ids(70, 9000), session_id="s", max_tokens=2))
    after = d.settle(begun, ids(50))
    assert after["lease"]["num_tokens"] == before["lease"]["num_tokens"]
    assert d.num_free == 20 - 2


def _scheduled_at_once(d, prompt_ids):
    request = d.add("live", prompt_ids, max_tokens=1)
    step = d.step()
    return request.request_id in step.num_scheduled_tokens


def test_a_new_request_is_admitted_in_the_same_step_as_on_an_empty_pool(make_harness):
    """With every block leased, a waiting request gets its blocks in one scheduling step, and no more than it needs."""
    assert _scheduled_at_once(make_harness("decode", num_blocks=16), ids(5 * BLOCK_SIZE, 50_000))
    d = make_harness("decode", num_blocks=16, budget_fraction=1.0)
    for i in range(4):
        d.lease(ids(4 * BLOCK_SIZE - 2, 1000 * i), f"s{i}")
    assert d.num_free == 0
    assert _scheduled_at_once(d, ids(5 * BLOCK_SIZE, 50_000))
    leases = [d.control("get", session_id=f"s{i}")["info"]["lease"] for i in range(4)]
    assert sum(lease["num_blocks"] for lease in leases) == 16 - 5
    assert {lease["reason"] for lease in leases} == {None, "lease_revoked"}


def test_a_running_request_takes_a_leased_block_instead_of_being_preempted(make_harness):
    """A decode that needs its next block never loses to a lease."""
    d = make_harness("decode", num_blocks=6, budget_fraction=1.0)
    d.lease(ids(4 * BLOCK_SIZE - 2), "s")
    request = d.add("live", ids(2 * BLOCK_SIZE - 1, 50_000), max_tokens=8)
    d.run(request)
    assert request.num_preemptions == 0
    assert request.num_output_tokens == 8
    assert d.control("get", session_id="s")["info"]["lease"] | {"remaining_s": 0} == {
        "state": "active",
        "remaining_s": 0,
        "num_tokens": 3 * BLOCK_SIZE,
        "num_blocks": 3,
        "reason": "lease_revoked",
    }


def test_a_request_that_cannot_be_helped_costs_no_lease(make_harness):
    """Where all leases together would not make room, none is touched."""
    d = make_harness("decode", num_blocks=12, budget_fraction=1.0)
    d.lease(ids(2 * BLOCK_SIZE - 2), "s")
    d.add("running", ids(6 * BLOCK_SIZE - 4, 40_000))
    d.answer(d.step())
    assert not _scheduled_at_once(d, ids(7 * BLOCK_SIZE, 50_000))
    assert d.control("get", session_id="s")["info"]["lease"]["reason"] is None


def test_a_request_does_not_revoke_the_prefix_that_it_hits(make_harness):
    """A session's own turn uses its leased blocks; the room for its tail comes from others."""
    d = make_harness("decode", num_blocks=8, budget_fraction=1.0, revocation="least_remaining")
    mine, others = ids(4 * BLOCK_SIZE - 2), ids(4 * BLOCK_SIZE - 2, 5000)
    d.lease(others, "others")
    d.control("extend", session_id="others", ttl_s=600)  # mine would be the first to go
    d.lease(mine, "s")
    request = d.add("live", mine[: 3 * BLOCK_SIZE] + ids(2 * BLOCK_SIZE, 70_000), max_tokens=1)
    assert d.step().num_scheduled_tokens == {request.request_id: 2 * BLOCK_SIZE}
    assert d.control("get", session_id="s")["info"]["lease"]["num_blocks"] == 3
    assert d.control("get", session_id="others")["info"]["lease"]["num_blocks"] == 3


def test_a_cache_reset_releases_all_leases_first(make_harness):
    """Stock vLLM refuses to reset while a block is pinned; leases give way, with a reason."""
    d = make_harness("decode", num_blocks=20)
    d.lease(ids(40), "s")
    assert d.scheduler.reset_prefix_cache()
    assert d.num_free == 20
    lease = d.control("get", session_id="s")["info"]["lease"]
    assert (lease["state"], lease["reason"]) == ("revoked", "reset")


def test_a_cache_reset_waits_for_readers(make_harness):
    """Under an open ticket nothing is reset, and nothing is lost."""
    d = make_harness("decode", num_blocks=20, min_fetch_tokens=0)
    d.lease(ids(40), "s")
    ticket = d.begin(ids(60), turn=2, want_ticket=True)["ticket"]
    assert not d.scheduler.reset_prefix_cache()
    assert d.control("get", session_id="s")["info"]["lease"]["state"] == "active"
    d.control("return_ticket", ticket_id=ticket["remote_request_id"])
    assert d.scheduler.reset_prefix_cache()


def test_new_weights_make_a_lease_useless(make_harness):
    """KV of other weights is given back at once, and never offered to a reader; the same weights change nothing."""
    d = make_harness("decode", num_blocks=20, min_fetch_tokens=0)
    d.lease(ids(40), "s")
    d.scheduler.connector.on_weight_version("default")
    assert d.num_free == 18
    d.scheduler.connector.on_weight_version("after training")
    assert d.num_free == 20
    begun = d.begin(ids(60), turn=2, want_ticket=True)
    assert (begun["ticket"], begun["lease_reason"]) == (None, "model_changed")


def test_new_weights_while_a_reader_reads(make_harness):
    """Leases end whoever reads: only a ticket keeps its blocks, until it is returned, and each session says why."""
    d = make_harness("decode", num_blocks=20, min_fetch_tokens=0)
    d.lease(ids(40), "s")
    d.lease(ids(70, 5000), "other")
    begun = d.begin(ids(60), turn=2, want_ticket=True)
    assert d.num_free == 20 - 2 - 3
    d.scheduler.connector.on_weight_version("after training")
    assert d.num_free == 20 - 2  # the ticket's
    for session_id in ("s", "other"):
        lease = d.control("get", session_id=session_id)["info"]["lease"]
        assert (lease["state"], lease["num_blocks"], lease["reason"]) == ("revoked", 0, "model_changed")
    d.control("return_ticket", ticket_id=begun["ticket"]["remote_request_id"])
    assert d.num_free == 20
    d.control("abandon", nonce=begun["nonce"], return_ticket=True)
    for session_id, prompt_ids in (("s", ids(60)), ("other", ids(90, 5000))):
        begun = d.begin(prompt_ids, turn=2, session_id=session_id, want_ticket=True)
        assert (begun["ticket"], begun["lease_reason"]) == (None, "model_changed")


@pytest.mark.parametrize("versions", [["after training"], ["after training", "default"]], ids=["new", "and back"])
def test_new_weights_during_a_turn(make_harness, versions):
    """What a running turn leaves behind may have been computed by either weights: nothing of it is held or used."""
    d = make_harness("decode", num_blocks=20, min_fetch_tokens=0)
    d.lease(ids(40), "s")
    begun = d.begin(ids(60), turn=2)
    request = d.add("r", ids(60), session_id=begun["nonce"], max_tokens=3)
    d.answer(d.step())
    for version in versions:
        d.scheduler.connector.on_weight_version(version)
    assert d.control("get", session_id="s")["info"]["lease"]["num_blocks"] == 0
    d.run(request)
    assert d.num_free == 20
    lease = d.settle(begun, list(request.all_token_ids))["lease"]
    assert (lease["state"], lease["num_blocks"], lease["reason"]) == ("revoked", 0, "model_changed")
    assert d.num_free == 20
    begun = d.begin(ids(80), turn=3, want_ticket=True)
    assert (begun["ticket"], begun["lease_reason"]) == (None, "model_changed")


def test_an_idle_scheduler_has_nothing_to_do_for_a_lease(make_harness):
    """A lease is no unfinished request: the engine may sleep."""
    d = make_harness("decode", num_blocks=20)
    d.lease(ids(40), "s")
    d.step()
    assert not d.scheduler.has_requests()
