"""P's connector in vLLM's schedulers: one verified read at most, and every failure ends in a computed prompt."""

import time

import pytest
from vllm.v1.request import RequestStatus

from server_ext.core.tickets import sign

from .harness import BLOCK_SIZE, SECRET, ids, ticket_for

PROMPT = ids(3 * BLOCK_SIZE)
HELD = 2 * BLOCK_SIZE + 5


def _ticket(p, *, num_tokens=HELD, prompt_ids=PROMPT, **other):
    return ticket_for(p, prompt_ids, num_tokens, **other)


def _report(p, request):
    """Finish a prefill request and return its report."""
    p.run(request)
    return request.kv_transfer_params, p.finished[request.request_id]["bidikv"]


@pytest.fixture
def p(make_harness):
    """A scheduler of P that keeps what its connector says of finished requests."""
    harness = make_harness("prefill", num_blocks=20)
    harness.finished = {}
    finish = harness.scheduler.connector.request_finished_all_groups

    def keep(request, block_ids):
        delay_free, params = finish(request, block_ids)
        harness.finished[request.request_id] = params
        return delay_free, params

    harness.scheduler.connector.request_finished_all_groups = keep
    return harness


def test_a_good_ticket_is_read_once_and_reported(p):
    """The leased prefix is loaded, the rest computed, and the counts add up."""
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p))
    step = p.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    p.answer(step, finished_recving={"r"})
    _, report = _report(p, request)
    assert (report["local_tokens"], report["fetched_tokens"], report["reason"]) == (0, HELD, None)
    assert report["fetch_s"] >= 0


def test_the_answer_says_until_when_p_keeps_its_blocks(p):
    """By P's own clock; and for how long that is, so that D can tell whether its heartbeats do as much."""
    before_s = time.perf_counter()
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p))
    p.answer(p.step(), finished_recving={"r"})
    _, report = _report(p, request)
    assert report["hold_s"] == 30
    assert before_s + 30 <= p.finished["r"]["remote_blocks_expiry_time"] <= time.perf_counter() + 30


def test_a_failed_read_is_computed_and_never_asked_for_again(p):
    """Stock vLLM would wait for the same read for ever."""
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p))
    step = p.step()
    (blocks,) = p.scheduler.kv_cache_manager.get_block_ids("r")
    p.answer(step, finished_recving={"r"}, invalid_block_ids=set(blocks[:3]))
    _, report = _report(p, request)
    assert (report["fetched_tokens"], report["reason"]) == (0, "read_failed")
    assert request.num_computed_tokens >= len(PROMPT)


def test_a_preempted_reader_computes(p):
    """A request that lost its fetched blocks to a preemption does not read them a second time."""
    request = p.add("r", PROMPT, max_tokens=4, transfer=_ticket(p))
    p.answer(p.step(), finished_recving={"r"})
    p.answer(p.step())
    assert request.num_output_tokens == 1
    p.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    _, report = _report(p, request)
    assert (report["fetched_tokens"], report["reason"]) == (0, "read_failed")


def _refused(p):
    """Return how many tickets P has refused, by reason, as it says when it is scraped; those that are not 0."""
    reply = p.scheduler.connector.control("metrics", {})["metrics"]
    return {reason: value for (reason,), value in reply["bidikv_tickets_refused_total"] if value}


@pytest.mark.parametrize(
    ("change", "refusal", "reason"),
    [
        ({"prompt_ids": ids(3 * BLOCK_SIZE, 7777)}, "wrong_prompt", "read_failed"),
        ({"num_tokens": 3 * BLOCK_SIZE + 1, "prompt_ids": ids(4 * BLOCK_SIZE)}, "wrong_length", "read_failed"),
        ({"block_ids": [0, 1]}, "wrong_blocks", "read_failed"),
        ({"block_ids": [0, 0, 1]}, "wrong_blocks", "read_failed"),
        ({"ticket_id": "chatcmpl-1"}, "malformed", "read_failed"),
        ({"fingerprint": "another model"}, "wrong_fingerprint", "model_changed"),
        ({"ttl_s": 4.0}, "ticket_late", "ticket_late"),
    ],
    ids=["other prompt", "too long", "too few blocks", "a block twice", "no ticket", "other model", "late"],
)
def test_a_ticket_that_does_not_fit_is_refused_and_the_prompt_computed(p, change, refusal, reason):
    """Only exactly the blocks of a prefix of this prompt are ever read; what is refused is named and counted."""
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p, **change))
    p.answer(p.step())
    _, report = _report(p, request)
    assert (report["fetched_tokens"], report["refusal"], report["reason"]) == (0, refusal, reason)
    assert _refused(p) == {refusal: 1}


def new_weights(p):
    """P serves others from now on."""
    p.scheduler.connector.connector_scheduler.on_weight_version("after training")


def test_a_ticket_is_not_read_under_new_weights(p):
    """What was right when the ticket came would stay in P's prefix cache as if these weights had computed it."""
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p))
    new_weights(p)
    p.answer(p.step())
    _, report = _report(p, request)
    refused = (report["fetched_tokens"], report["refusal"], report["reason"])
    assert refused == (0, "wrong_fingerprint", "model_changed")


@pytest.mark.parametrize("comes", ["before the read", "after the read"])
def test_an_answer_of_two_weights_is_of_none(p, comes):
    """D takes it for neither; it may already serve the new weights, or still the old ones."""
    identity = p.scheduler.connector.connector_scheduler.identity
    before = identity.fingerprint
    request = p.add("r", PROMPT, max_tokens=1, transfer=_ticket(p))
    if comes == "before the read":
        new_weights(p)
    p.answer(p.step(), finished_recving={"r"} if comes == "after the read" else set())
    if comes == "after the read":
        new_weights(p)
    _, report = _report(p, request)
    assert report["fingerprint"] not in {before, identity.fingerprint}


def test_a_ticket_is_good_for_one_read(p):
    """A replayed ticket is refused."""
    first = p.add("first", PROMPT, max_tokens=1, transfer=_ticket(p))
    p.answer(p.step(), finished_recving={"first"})
    _report(p, first)
    assert _refused(p) == {}
    # A longer prompt, so that P's own prefix does not cover the ticket.
    second = p.add("second", PROMPT, max_tokens=1, transfer=_ticket(p), cache_salt="cold")
    p.answer(p.step())
    _, report = _report(p, second)
    assert (report["refusal"], report["reason"]) == ("already_used", "read_failed")
    assert _refused(p) == {"already_used": 1}


@pytest.mark.parametrize("secret", [b"another secret, which P does not know", None], ids=["forged", "unsigned"])
def test_a_ticket_that_this_deployment_did_not_sign_is_nothing(p, secret):
    """Such parameters do not even make P keep blocks for a decode node; that they came is told, logged and counted."""
    transfer = _ticket(p, secret=secret or SECRET)
    if secret is None:
        del transfer["bidikv_mac"]
    request = p.add("r", PROMPT, max_tokens=1, transfer=transfer)
    p.run(request)
    assert p.finished["r"] == {"bidikv": {"reason": "read_failed", "refusal": "forged"}}
    assert p.num_free == 20
    assert _refused(p) == {"forged": 1}
    p.run(p.add("plain", PROMPT, max_tokens=1))
    assert (p.finished["plain"], _refused(p)) == (None, {"forged": 1})


def test_a_prefix_that_p_holds_itself_is_not_fetched(p):
    """Where P's own cache covers the ticket there is nothing to read, and nothing went wrong."""
    plain = sign({"do_remote_decode": True, "do_remote_prefill": False}, SECRET)
    _report(p, p.add("warm", PROMPT, max_tokens=1, transfer=plain))
    request = p.add("r", PROMPT + ids(8, 9000), max_tokens=1, transfer=_ticket(p))
    p.answer(p.step())
    _, report = _report(p, request)
    assert (report["local_tokens"], report["fetched_tokens"], report["reason"]) == (3 * BLOCK_SIZE, 0, None)
