"""What a home signs, and everything that a reader refuses."""

import json
import struct
from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_sdk.wire import REASONS
from server_ext.core.tickets import (
    MAC_KEY,
    REFUSAL_REASONS,
    TICKET_ID_PREFIX,
    build_ticket,
    check_ticket,
    hash_ids,
    sign,
    verify,
)

from .fakes import SECRET, address_until

PROMPT = list(range(100, 120))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def make_ticket(**changes):
    """Return a ticket for the first 10 tokens of PROMPT in 3 blocks of 4."""
    fields = {
        "ticket_id": TICKET_ID_PREFIX + "1",
        "block_ids": array("i", [7, 3, 9]),
        "num_tokens": 10,
        "prompt_ids": PROMPT,
        "fingerprint": "model-1",
        "nonce": "n1",
        "secret": SECRET,
    }
    return build_ticket(address_until(60.5), **(fields | changes))


def check(params, **changes):
    """Check a ticket as a reader of PROMPT would."""
    how = {"prompt_ids": PROMPT, "fingerprint": "model-1", "block_size": 4, "seen_ids": set()}
    return check_ticket(params, **(how | changes))


# ---------------------------------------------------------------- the MAC


def test_a_genuine_ticket_verifies_after_a_trip_over_http():
    """What was signed verifies after JSON, in any order of its fields, and comes back without its MAC."""
    ticket = make_ticket()
    travelled = json.loads(json.dumps(dict(reversed(ticket.items()))))
    params = verify(travelled, SECRET)
    assert params == {name: value for name, value in ticket.items() if name != MAC_KEY}
    assert check(params) is None


def test_a_ticket_speaks_vllms_own_field_names():
    """The fields are those that a NIXL reader of vLLM expects, with one group of blocks."""
    assert {name: value for name, value in make_ticket().items() if not name.startswith("bidikv")} == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [[7, 3, 9]],
        "remote_engine_id": "engine-d",
        "remote_request_id": "bidikv-ticket-1",
        "remote_host": "d.example",
        "remote_port": 5600,
        "remote_num_tokens": 10,
        "tp_size": 1,
        "remote_blocks_expiry_time": 60.5,
    }


def test_any_change_breaks_the_mac():
    """No field can be changed, added or left out, and another secret signs nothing for us."""
    ticket = make_ticket()
    for name in ticket:
        assert verify({n: v for n, v in ticket.items() if n != name}, SECRET) is None
        assert verify(ticket | {name: "other"}, SECRET) is None
    assert verify(ticket | {"extra": 1}, SECRET) is None
    assert verify(ticket | {"bidikv": ticket["bidikv"] | {"nonce": "n2"}}, SECRET) is None
    assert verify(ticket, b"another secret") is None


def test_signing_again_replaces_the_mac():
    """A MAC that is there already is not signed along."""
    ticket = make_ticket()
    assert sign(ticket, SECRET) == ticket


@pytest.mark.parametrize("mac", [None, 5, b"00", ["x"], "", "é" * 64, "\ud800", "0" * 64])
def test_a_mac_of_any_kind_is_only_a_wrong_mac(mac):
    """Wrongly typed, non-ASCII or malformed MACs are refused like wrong ones."""
    assert verify(make_ticket() | {MAC_KEY: mac}, SECRET) is None


def deep(levels):
    """Return a list nested more deeply than JSON can be written."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        "x",
        [1],
        {},
        {MAC_KEY: "0", "a": {1, 2}},
        {MAC_KEY: "0", "a": float("nan")},
        {MAC_KEY: "0", 1: 1, "a": 1},
        {MAC_KEY: "0", "a": 1 << 20_000},
        {MAC_KEY: "0", "a": deep(100_000)},
    ],
    ids=["none", "text", "list", "empty", "set", "nan", "keys", "huge", "deep"],
)
def test_garbage_is_refused_without_an_exception(garbage):
    """Whatever a stranger sends where a ticket belongs is not a ticket."""
    assert verify(garbage, SECRET) is None


@given(JSON)
def test_verify_never_raises(value):
    """Any value, as the whole or as a field, is refused without an exception."""
    assert verify(value, SECRET) is None
    assert verify({MAC_KEY: value, "a": value}, SECRET) is None


# ---------------------------------------------------------------- the hash


def test_ids_are_hashed_as_little_endian_int32():
    """The hash of the first n ids is that of their packed bytes, from a list or an array."""
    expected = sha256(struct.pack("<3i", 1, 2, 70_000)).hexdigest()
    assert hash_ids([1, 2, 70_000, 4], 3) == expected
    assert hash_ids(array("i", [1, 2, 70_000, 4]), 3) == expected


def test_more_ids_than_there_are_cannot_be_hashed():
    """Asking for a hash beyond the end is an error, not the hash of something shorter."""
    with pytest.raises(ValueError, match="cannot hash 4 token ids of 3"):
        hash_ids([1, 2, 3], 4)


# ---------------------------------------------------------------- the reader's check


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"do_remote_decode": False}, "malformed"),
        ({"do_remote_decode": 1}, "malformed"),
        ({"remote_engine_id": None}, "malformed"),
        ({"remote_host": 7}, "malformed"),
        ({"remote_port": "5600"}, "malformed"),
        ({"remote_port": 0}, "malformed"),
        ({"remote_port": 65_536}, "malformed"),
        ({"tp_size": True}, "malformed"),
        ({"tp_size": 0}, "malformed"),
        ({"remote_request_id": "chatcmpl-1"}, "malformed"),
        ({"remote_num_tokens": 10.0}, "malformed"),
        ({"remote_blocks_expiry_time": None}, "malformed"),
        ({"remote_blocks_expiry_time": float("inf")}, "malformed"),
        ({"remote_block_ids": None}, "malformed"),
        ({"remote_block_ids": []}, "malformed"),
        ({"remote_block_ids": [7, 3, 9]}, "malformed"),
        ({"remote_block_ids": [[7, 3, 9], [1]]}, "malformed"),
        ({"remote_block_ids": [[7, 3, -9]]}, "malformed"),
        ({"remote_block_ids": [[7, 3, True]]}, "malformed"),
        ({"bidikv_ttl_s": None}, "malformed"),
        ({"bidikv_ttl_s": True}, "malformed"),
        ({"bidikv": None}, "malformed"),
        ({"bidikv": {"version": 2, "prompt_hash": "", "fingerprint": "model-1", "nonce": "n"}}, "malformed"),
        ({"bidikv": {"version": 1, "prompt_hash": 1, "fingerprint": "model-1", "nonce": "n"}}, "malformed"),
        ({"bidikv": {"version": 1, "prompt_hash": "", "fingerprint": None, "nonce": "n"}}, "malformed"),
        ({"bidikv": {"version": 1, "prompt_hash": "", "fingerprint": ""}}, "malformed"),
        ({"remote_num_tokens": 0}, "wrong_length"),
        ({"remote_num_tokens": -1}, "wrong_length"),
        ({"remote_num_tokens": 21}, "wrong_length"),
        ({"remote_block_ids": [[7, 3]]}, "wrong_blocks"),
        ({"remote_block_ids": [[7, 3, 9, 1]]}, "wrong_blocks"),
        ({"remote_block_ids": [[7, 3, 7]]}, "wrong_blocks"),
        ({"remote_num_tokens": 8}, "wrong_blocks"),
        ({"remote_num_tokens": 9}, "wrong_prompt"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_by_name(changes, refusal):
    """Each field that is not what this reader's read needs has a stable name for its refusal."""
    assert check(make_ticket() | changes) == refusal


def test_what_is_no_object_is_malformed():
    """The check itself also takes whatever it is given."""
    assert check(None) == check(7) == "malformed"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"prompt_ids": PROMPT[:9]}, "wrong_length"),
        ({"prompt_ids": [*PROMPT[:9], 1, *PROMPT[10:]]}, "wrong_prompt"),
        ({"fingerprint": "model-2"}, "wrong_fingerprint"),
        ({"block_size": 16}, "wrong_blocks"),
        ({"seen_ids": {"bidikv-ticket-1"}}, "already_used"),
    ],
)
def test_a_genuine_ticket_is_refused_by_the_wrong_reader(changes, refusal):
    """Another prompt, model or block size refuses a ticket that is good in itself, and so does a use."""
    assert check(make_ticket(), **changes) == refusal


def test_what_follows_the_covered_prefix_does_not_matter():
    """The reader's prompt may go on as it likes behind the covered tokens, or end there."""
    assert check(make_ticket(), prompt_ids=[*PROMPT[:10], 1, 2, 3]) is None
    assert check(make_ticket(), prompt_ids=PROMPT[:10]) is None


def test_every_refusal_has_a_reason_of_the_wire():
    """What a reader refuses reaches the client as one of the closed list of reasons."""
    assert set(REFUSAL_REASONS.values()) <= set(REASONS)
    assert REFUSAL_REASONS["wrong_fingerprint"] == "model_changed"


@given(st.sampled_from([*make_ticket(), "bidikv"]), JSON)
def test_the_check_never_raises(name, value):
    """Any value in any field is accepted or refused by name."""
    assert check(make_ticket() | {name: value}) in {None, *REFUSAL_REASONS}
