"""The wire types: what is written can be read, and what is wrong is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_sdk import wire
from bidikv_sdk.wire import (
    CacheReport,
    Choice,
    ErrorInfo,
    LeaseInfo,
    PoolInfo,
    ProtocolError,
    SessionInfo,
    Timings,
    sessions_from_json,
    sessions_to_json,
)

counts = st.integers(0, 2**40)
seconds = st.floats(0, 1e6)
leases = st.builds(
    LeaseInfo,
    state=st.sampled_from(wire.LEASE_STATES),
    remaining_s=seconds,
    num_tokens=counts,
    num_blocks=counts,
    reason=st.none() | st.sampled_from(wire.REASONS),
)
timings = st.builds(Timings, render=st.none() | seconds, ttft=st.none() | seconds)
reports = st.builds(
    CacheReport,
    outcome=st.sampled_from(wire.OUTCOMES),
    reason=st.sampled_from(wire.REASONS),
    prompt_tokens=counts,
    held_tokens=counts,
    reused_tokens=counts,
    fetched_tokens=counts,
    computed_tokens=counts,
    diverged_at=st.none() | counts,
    timings_s=timings,
    choice=st.none() | st.builds(Choice, by=st.sampled_from(wire.CHOSEN_BY), local=st.none() | seconds),
)
infos = st.builds(
    SessionInfo,
    session=st.text(),
    turn=counts,
    lease=leases,
    cache=st.none() | reports,
    pool=st.builds(PoolInfo, free_blocks=counts, total_blocks=counts, pending_ticket_blocks=counts),
    protocol=st.just(wire.PROTOCOL),
    last_turn=st.none() | reports,
)
errors = st.builds(
    ErrorInfo,
    code=st.sampled_from(wire.ERROR_CODES),
    message=st.text(),
    param=st.none() | st.text(),
    retry_after_s=st.none() | seconds,
    expected_turn=st.none() | counts,
    reason=st.none() | st.sampled_from(wire.REASONS),
)


def make_info() -> SessionInfo:
    """Build one complete object."""
    lease = LeaseInfo("active", 59.5, 100, 7)
    cache = CacheReport("fetched", "cheapest", 120, 100, 0, 100, 20)
    return SessionInfo("s", 3, lease, cache, PoolInfo(1, 2, 0))


@given(infos)
def test_session_info_survives_the_wire(info):
    """What `to_json` writes, `from_json` reads back as the same object."""
    assert SessionInfo.from_json(info.to_json()) == info


@given(errors)
def test_error_info_survives_the_wire(error):
    """What `to_json` writes, `from_json` reads back as the same error."""
    assert ErrorInfo.from_json(error.to_json()) == error


def test_json_has_the_documented_fields():
    """Every field is written, also where it is null, because a reader may ask for it."""
    data = make_info().to_json()
    assert set(data) == {"protocol", "session", "turn", "lease", "cache", "pool", "last_turn"}
    assert set(data["lease"]) == {"state", "remaining_s", "num_tokens", "num_blocks", "reason"}
    assert set(data["cache"]["timings_s"]) == {
        "render", "begin", "prefill", "fetch", "handover", "settle", "ttft",
    }  # fmt: skip
    assert data["protocol"] == wire.PROTOCOL == 1


def test_an_older_peer_says_nothing_of_the_last_turn():
    """A server from before there was `last_turn` is understood."""
    data = make_info().to_json()
    del data["last_turn"]
    assert SessionInfo.from_json(data) == make_info()


def test_unknown_fields_of_a_newer_peer_are_ignored():
    """A field that this version does not know changes nothing, at any depth."""
    data = make_info().to_json()
    for part in (data, data["lease"], data["cache"], data["cache"]["timings_s"], data["pool"]):
        part["from_the_future"] = {"x": 1}
    assert SessionInfo.from_json(data) == make_info()


@pytest.mark.parametrize("path", [("turn",), ("lease", "state"), ("cache", "outcome"), ("cache", "timings_s")])
def test_a_missing_field_is_named(path):
    """The error says which field is missing, and in which object."""
    data = part = make_info().to_json()
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    owner = path[-2] if len(path) > 1 else "bidikv"
    with pytest.raises(ProtocolError, match=rf"{owner}\.{path[-1]} is missing"):
        SessionInfo.from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("turn",), -1, "bidikv.turn must be an integer >= 0, got -1"),
        (("turn",), True, "bidikv.turn must be an integer"),
        (("session",), 7, "bidikv.session must be a string, got 7"),
        (("lease",), [], "lease must be a JSON object"),
        (("lease", "remaining_s"), "x", "lease.remaining_s must be a number"),
        (("lease", "state"), "asleep", "lease.state must be one of none, active"),
        (("lease", "reason"), "bored", "lease.reason must be one of first_turn"),
        (("protocol",), 2, "the peer speaks protocol 2, this package speaks 1"),
    ],
)
def test_a_wrong_value_is_named(path, value, message):
    """The error says which field is wrong, what it should be and what it is."""
    data = part = make_info().to_json()
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(ProtocolError, match=message):
        SessionInfo.from_json(data)


def test_error_codes_have_a_status_and_openai_s_shape():
    """Every code has its HTTP status, and every error a type; extra fields are there only where set."""
    assert set(wire.ERROR_STATUS) == set(wire.ERROR_CODES)
    for code in wire.ERROR_CODES:
        info = ErrorInfo(code, "message")
        assert info.status == wire.ERROR_STATUS[code]
        data = info.to_json()
        assert set(data) == {"message", "type", "param", "code"}
        assert data["type"].endswith("_error")
    assert ErrorInfo("lease_lost", "m", reason="released").to_json()["reason"] == "released"


def test_a_list_of_sessions_survives_the_wire():
    """The list route has OpenAI's list shape, and anything else is refused."""
    assert sessions_from_json(sessions_to_json([make_info()])) == [make_info()]
    with pytest.raises(ProtocolError, match=r"sessions\.data must be a list"):
        sessions_from_json({"data": 3})


def test_a_protocol_error_is_a_value_error():
    """Callers that know nothing of the wire can catch a ValueError."""
    assert issubclass(ProtocolError, ValueError)


def test_a_peer_that_knows_no_choices_is_understood():
    """The field came later: a report without it is one of a turn that chose nothing."""
    data = make_info().to_json()
    del data["cache"]["choice"]
    assert SessionInfo.from_json(data) == make_info()


def test_a_choice_names_its_faults():
    """What `auto` chose from is checked like the rest."""
    data = make_info().to_json()
    data["cache"]["choice"] = {"by": "cheapest", "fetch": "soon"}
    with pytest.raises(ProtocolError, match=r"choice\.fetch"):
        SessionInfo.from_json(data)
