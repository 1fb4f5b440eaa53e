"""D's call to P: a wrong, late or absent answer is `PrefillUnavailable`, and says whether P could still read."""

import asyncio
import re
from array import array

import httpx
import pytest

from server_ext.core.settings import HomeSettings
from server_ext.http.prefill_client import PrefillClient, PrefillUnavailable
from server_ext.http.prefill_route import PREFILL_PATH, engine_request_id, prefill_token, unpack_ids

from .fakes import BLOCK_SIZE, SECRET, FakePrefillNode, make_settings

TICKET = {"do_remote_decode": True, "remote_num_tokens": 40, "bidikv_mac": "x"}
IDS = array("i", range(100))


def call(handler, *, num_calls=1, ids=IDS, **settings):
    """Have a prompt computed; return the last answer."""

    async def main():
        transport = httpx.MockTransport(handler)
        client = PrefillClient(make_settings(**settings), block_size=BLOCK_SIZE, transport=transport)
        try:
            for _ in range(num_calls):
                answer = await client.prefill(ids, TICKET, cache_salt="salt", request_id="r1")
            return answer
        finally:
            await client.close()

    return asyncio.run(main())


def answering(answer):
    """Return a P that answers so."""
    p = FakePrefillNode()
    p.answer = answer
    return p


def test_a_good_answer():
    """P gets the prompt, the ticket and the salt; D gets P's parameters without the report."""
    seen = []

    async def handler(request):
        seen.append(request)
        return await p(request)

    p = FakePrefillNode()
    prefilled = call(handler)
    assert (prefilled.local_tokens, prefilled.fetched_tokens, prefilled.fetch_s, prefilled.reason) == (
        0,
        40,
        0.01,
        None,
    )
    assert prefilled.params["remote_block_ids"] == [[0, 1, 2, 3]]
    assert prefilled.params.keys() & {"bidikv", "remote_prefill_cached_tokens"} == set()
    (body,) = p.calls
    assert unpack_ids(body.pop("token_ids")) == list(range(100))
    assert body == {"kv_transfer_params": TICKET, "cache_salt": "salt"}
    assert str(seen[0].url) == f"http://p1{PREFILL_PATH}"
    assert seen[0].headers["authorization"] == f"Bearer {prefill_token(SECRET)}"
    assert seen[0].headers["x-request-id"] == "r1"


GOOD_REPORT = {"local_tokens": 0, "fetched_tokens": 40, "fetch_s": None, "read_age_s": None, "reason": None} | {
    "fingerprint": "m",
    "hold_s": 30,
}
MALFORMED = {
    "too few blocks": {"remote_block_ids": [[0, 1, 2]]},
    "too many blocks": {"remote_block_ids": [[0, 1, 2, 3, 4]]},
    "no blocks": {"remote_block_ids": []},
    "two groups": {"remote_block_ids": [[0, 1, 2, 3], [0, 1, 2, 3]]},
    "blocks that are none": {"remote_block_ids": None},
    "blocks as strings": {"remote_block_ids": [["0", "1", "2", "3"]]},
    "blocks as one string": {"remote_block_ids": ["0123"]},
    "blocks as a number": {"remote_block_ids": [4]},
    "blocks as flags": {"remote_block_ids": [[True, True, True, True]]},
    "negative blocks": {"remote_block_ids": [[0, 1, 2, -3]]},
    "not to be read": {"do_remote_prefill": False},
    "perhaps to be read": {"do_remote_prefill": "yes"},
    "no report": {"bidikv": None},
    "an empty report": {"bidikv": {}},
    "a report that is a list": {"bidikv": [1]},
    "tokens as a string": {"bidikv": {**GOOD_REPORT, "local_tokens": "5"}},
    "tokens without end": {"bidikv": {**GOOD_REPORT, "local_tokens": float("inf")}},
    "fewer than no tokens": {"bidikv": {**GOOD_REPORT, "local_tokens": -1}},
    "more tokens than the prompt": {"bidikv": {**GOOD_REPORT, "local_tokens": 61}},
    "a duration as a string": {"bidikv": {**GOOD_REPORT, "fetch_s": "soon"}},
    "an age as a string": {"bidikv": {**GOOD_REPORT, "read_age_s": "old"}},
    "no fingerprint": {"bidikv": {**GOOD_REPORT, "fingerprint": None}},
    "no engine id": {"remote_engine_id": None},
    "no request id": {"remote_request_id": None},
    "a request id that P's engine would not understand": {"remote_request_id": "HB:x"},
    "no host": {"remote_host": None},
    "a port as a string": {"remote_port": "5600"},
    "no end of the hold": {"remote_blocks_expiry_time": None},
    "a hold without end": {"remote_blocks_expiry_time": float("inf")},
    "a hold that is no number": {"remote_blocks_expiry_time": float("nan")},
    "a hold shorter than D counts on": {"bidikv": {**GOOD_REPORT, "hold_s": 29}},
    "a hold as a string": {"bidikv": {**GOOD_REPORT, "hold_s": "30"}},
    "a reason that nobody knows": {"bidikv": {**GOOD_REPORT, "reason": "moon"}},
    "a reason that is a list": {"bidikv": {**GOOD_REPORT, "reason": []}},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_none(changes):
    """What D's engine or the client would trip over ends here; such a P may still be reading."""
    import json

    p = answering(lambda body: httpx.Response(200, text=json.dumps(FakePrefillNode.rightly(body, **changes))))
    with pytest.raises(PrefillUnavailable) as unavailable:
        call(p)
    assert unavailable.value.may_still_read


@pytest.mark.parametrize(
    ("answer", "may_still_read"),
    [
        (httpx.Response(200, text="<html>"), True),
        (httpx.Response(200, json=[1]), True),
        (httpx.Response(200, json={}), True),
        (httpx.Response(200, json={"kv_transfer_params": None}), True),
        (httpx.Response(200, text="[" * 100_000), True),
        (httpx.Response(500), True),
        (httpx.Response(503), True),
        (httpx.Response(302, headers={"location": "http://evil"}), True),
        (httpx.Response(404), False),
        (httpx.Response(401), False),
        (httpx.Response(408), True),
        (httpx.Response(429), True),
        (httpx.ReadError("cut"), True),
        (httpx.RemoteProtocolError("cut"), True),
        (httpx.WriteError("cut"), True),
        (httpx.ConnectError("refused"), False),
        (httpx.ConnectTimeout("nobody there"), False),
    ],
    ids=repr,
)
def test_no_answer(answer, may_still_read):
    """Only a P that was not reached, or that refused the call as such, cannot be reading."""
    with pytest.raises(PrefillUnavailable, match="http://p1") as unavailable:
        call(answering(lambda body: answer))
    assert unavailable.value.may_still_read == may_still_read


@pytest.mark.parametrize("given", ["a,b", "HB:x", "bidikv-ticket-x", "x:1", "", "ümlaut", "a b\n"], ids=repr)
def test_no_name_of_a_callers_means_anything_between_engines(given):
    """They name requests to each other in notes with commas and colons: a name with one could be that of another."""
    name = engine_request_id(given)
    assert name.startswith("turn-")
    assert re.fullmatch(r"[\w.-]+", name, re.ASCII)
    assert engine_request_id("chatcmpl-8.f_0") == "turn-chatcmpl-8.f_0"


def test_a_p_that_holds_the_ticket_for_forged():
    """Nothing was read and nothing is kept for D: the turn is told of a read that failed, and the log of the secret."""
    refused = httpx.Response(
        200, json={"kv_transfer_params": {"bidikv": {"reason": "read_failed", "refusal": "forged"}}}
    )
    with pytest.raises(PrefillUnavailable, match="secret_file") as unavailable:
        call(answering(lambda body: refused))
    assert (unavailable.value.may_still_read, unavailable.value.reason) == (False, "read_failed")


def test_without_a_prefill_node():
    """There is nobody to ask, and nobody who reads."""
    with pytest.raises(PrefillUnavailable, match="prefill_urls") as unavailable:
        call(FakePrefillNode(), prefill_urls=())
    assert not unavailable.value.may_still_read


def test_the_deadline_is_kept():
    """A P that never answers is given up; it may still be reading."""

    async def never(request):
        await asyncio.Event().wait()

    with pytest.raises(PrefillUnavailable, match="failed after") as unavailable:
        call(never, prefill_timeout_s=0.01)
    assert unavailable.value.may_still_read


@pytest.mark.parametrize(
    ("first", "asked"),
    [
        (httpx.ConnectError("refused"), ["p1", "p2"]),
        (httpx.ConnectTimeout("nobody there"), ["p1", "p2"]),
        (httpx.Response(404), ["p1", "p2"]),
        (httpx.Response(500), ["p1"]),
        (httpx.ReadError("cut"), ["p1"]),
        (None, ["p1"]),
    ],
    ids=repr,
)
def test_the_next_node_is_asked_where_the_first_cannot_be_reading(first, asked):
    """Two readers of one ticket there must never be."""
    p, hosts = FakePrefillNode(), []

    async def handler(request):
        hosts.append(request.url.host)
        if request.url.host == "p1" and first is not None:
            p.answer = lambda body: first
        else:
            p.answer = lambda body: httpx.Response(200, json=p.rightly(body))
        return await p(request)

    urls = ("http://p1", "http://p2")
    if len(asked) == 2 or first is None:
        assert call(handler, prefill_urls=urls).fetched_tokens == 40
    else:
        with pytest.raises(PrefillUnavailable):
            call(handler, prefill_urls=urls)
    assert hosts == asked


def test_the_deadline_follows_the_rate_that_p_shows(monkeypatch):
    """Where no deadline is set it is 10 s and twice what the prompt takes at the expected rate."""
    clock, deadlines = [0.0], []

    async def handler(request):
        clock[0] += 1.0  # 200 tokens were computed (40 fetched): four times what was expected
        return await FakePrefillNode()(request)

    def timeout(deadline_s):
        deadlines.append(deadline_s)
        return real_timeout(None)

    real_timeout = asyncio.timeout
    monkeypatch.setattr("server_ext.http.prefill_client.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("server_ext.http.prefill_client.asyncio.timeout", timeout)
    call(handler, num_calls=3, ids=array("i", range(240)), prefill_timeout_s=None)
    assert deadlines == pytest.approx([10 + 480 / 50, 10 + 480 / 95, 10 + 480 / 126.5])


def test_a_p_that_misses_its_deadline_gets_more_time_but_never_without_end(monkeypatch):
    """It is expected to be half as fast the next time; a quarter of a turn's time is the limit."""
    deadlines = []
    settings = make_settings(prefill_timeout_s=None, home=HomeSettings(turn_timeout_s=400.0))

    class Missed:
        async def __aenter__(self):
            raise TimeoutError

        async def __aexit__(self, *exc_info):
            return None

    def timeout(deadline_s):
        deadlines.append(deadline_s)
        return Missed()

    monkeypatch.setattr("server_ext.http.prefill_client.asyncio.timeout", timeout)

    async def main():
        client = PrefillClient(settings, block_size=BLOCK_SIZE, transport=httpx.MockTransport(FakePrefillNode()))
        for _ in range(12):
            with pytest.raises(PrefillUnavailable):
                await client.prefill(IDS, TICKET, cache_salt=None, request_id="r1")
        await client.close()

    asyncio.run(main())
    assert deadlines[:3] == [10 + 4, 10 + 8, 10 + 16]
    assert deadlines[-1] == 100.0
