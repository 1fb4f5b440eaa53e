"""Tickets on the wire: what a home signs, what a reader checks before it touches a foreign engine's blocks.

A ticket is vLLM's own `kv_transfer_params` plus `bidikv` (what it was issued for) and `bidikv_mac`. The home
calls `build_ticket`; the reader calls `verify`, then `check_ticket`. Everything that the reader gets comes
from outside, so neither raises on it, of whatever type it is. Pure; may import the standard library,
`bidikv_sdk` and its neighbours.
"""

import hashlib
import hmac
import json
import math
import sys
from array import array
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from bidikv_sdk.prefix import num_blocks

if TYPE_CHECKING:
    from bidikv_sdk.wire import Reason

MAC_KEY: Final = "bidikv_mac"
TICKET_VERSION: Final = 1
"""Of the fields that a reader relies on; another one is refused as malformed.

1. The first version.
"""
TICKET_ID_PREFIX: Final = "bidikv-ticket-"
"""Tells a ticket's `remote_request_id` from a request's, in the notifications that readers send."""

Refusal: TypeAlias = Literal[
    "forged",
    "malformed",
    "wrong_length",
    "wrong_blocks",
    "wrong_prompt",
    "wrong_fingerprint",
    "already_used",
    "ticket_late",
]
"""Why a reader does not use a ticket; stable names, for logs and metrics. `forged` is what `verify` refuses, and
`ticket_late` tells that the reader's turn came too late for it; all others are found by `check_ticket`."""

REFUSAL_REASONS: "Final[Mapping[Refusal, Reason]]" = MappingProxyType(
    {
        "forged": "read_failed",
        "malformed": "read_failed",
        "wrong_length": "read_failed",
        "wrong_blocks": "read_failed",
        "wrong_prompt": "read_failed",
        "wrong_fingerprint": "model_changed",
        "already_used": "read_failed",
        "ticket_late": "ticket_late",
    }
)
"""The wire's reason of each refusal."""

_TEXT_FIELDS: Final = ("remote_engine_id", "remote_request_id", "remote_host")
_COUNT_FIELDS: Final = ("remote_port", "remote_num_tokens", "tp_size")
_MAX_PORT: Final = 0xFFFF


def sign(params: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """Return a copy of `params` with an HMAC-SHA256 of all of it under `bidikv_mac` (an old one is replaced).

    Raises:
        TypeError, ValueError: `params` is not JSON.
    """
    signed = {name: value for name, value in params.items() if name != MAC_KEY}
    signed[MAC_KEY] = _mac(signed, secret)
    return signed


def verify(params: object, secret: bytes) -> dict[str, Any] | None:
    """Return `params` without its MAC, or None where it is not exactly what the owner of `secret` signed."""
    if not isinstance(params, Mapping):
        return None
    unsigned = {name: value for name, value in params.items() if name != MAC_KEY}
    given = params.get(MAC_KEY)
    if not isinstance(given, str):
        return None
    try:
        expected = _mac(unsigned, secret)
    except (TypeError, ValueError, RecursionError):
        return None
    # Bytes, for compare_digest refuses text that is not ASCII.
    is_genuine = hmac.compare_digest(expected.encode(), given.encode(errors="replace"))
    return unsigned if is_genuine else None


def hash_ids(token_ids: "Sequence[int] | array[int]", num_tokens: int) -> str:
    """Return the SHA-256 (hex) of the first `num_tokens` ids as little-endian int32.

    Raises:
        ValueError: there are fewer ids.
        OverflowError: an id does not fit in int32.
    """
    if num_tokens > len(token_ids):
        msg = f"cannot hash {num_tokens} token ids of {len(token_ids)}"
        raise ValueError(msg)
    ids = array("i", token_ids[:num_tokens])
    if sys.byteorder == "big":  # pragma: no cover (no such machine here)
        ids.byteswap()
    return hashlib.sha256(ids).hexdigest()


def build_ticket(
    address: Mapping[str, Any],
    *,
    ticket_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    prompt_ids: "Sequence[int] | array[int]",
    fingerprint: str,
    nonce: str,
    secret: bytes,
) -> dict[str, Any]:
    """Return the signed `kv_transfer_params` of a ticket.

    Args:
        address: how to reach the engine: `remote_engine_id`, `remote_host`, `remote_port`, `tp_size`,
            `remote_blocks_expiry_time` (on the engine's own clock), `bidikv_ttl_s` (the same as seconds from now), and
            what else its transport wants.
        ticket_id: with `TICKET_ID_PREFIX`.
        block_ids: [blocks of num_tokens], in the order of the tokens.
        num_tokens: tokens that the ticket covers, at most those of the prompt.
        prompt_ids: [>= num_tokens], of the prompt that it is for.
        fingerprint: of what computed the blocks.
        nonce: of the turn.
        secret: shared with the readers.
    """
    return sign(
        {
            **address,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [list(block_ids)],
            "remote_request_id": ticket_id,
            "remote_num_tokens": num_tokens,
            "bidikv": {
                "version": TICKET_VERSION,
                "prompt_hash": hash_ids(prompt_ids, num_tokens),
                "fingerprint": fingerprint,
                "nonce": nonce,
            },
        },
        secret,
    )


def check_ticket(
    params: Mapping[str, Any],
    *,
    prompt_ids: "Sequence[int] | array[int]",
    fingerprint: str,
    block_size: int,
    seen_ids: Container[str],
) -> Refusal | None:
    """Return why a reader must not use a verified ticket; None where it may read, if it does so in time.

    What it covers must be exactly a prefix of the reader's own prompt, in exactly as many blocks as that
    takes: vLLM pairs the blocks of both sides by position and asks nothing more.

    Args:
        params: what `verify` returned.
        prompt_ids: [num_tokens], of the request that carries the ticket.
        fingerprint: of the reader.
        block_size: tokens per block, on both sides.
        seen_ids: `remote_request_id`s that were used before; a ticket is for one read.
    """
    if not _is_well_formed(params):
        return "malformed"
    num_tokens, issued_for = params["remote_num_tokens"], params["bidikv"]
    block_ids = params["remote_block_ids"][0]
    if not 0 < num_tokens <= len(prompt_ids):
        return "wrong_length"
    if len(block_ids) != num_blocks(num_tokens, block_size) or len(set(block_ids)) != len(block_ids):
        return "wrong_blocks"
    if issued_for["fingerprint"] != fingerprint:
        return "wrong_fingerprint"
    if issued_for["prompt_hash"] != hash_ids(prompt_ids, num_tokens):
        return "wrong_prompt"
    if params["remote_request_id"] in seen_ids:
        return "already_used"
    return None


def _mac(params: Mapping[str, Any], secret: bytes) -> str:
    canonical = json.dumps(params, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hmac.new(secret, canonical.encode(), hashlib.sha256).hexdigest()


def _is_well_formed(params: object) -> bool:
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return False
    groups: Any = params.get("remote_block_ids")
    issued_for, expiry = params.get("bidikv"), params.get("remote_blocks_expiry_time")
    ttl_s = params.get("bidikv_ttl_s")
    return (
        all(isinstance(params.get(name), str) for name in _TEXT_FIELDS)
        and params["remote_request_id"].startswith(TICKET_ID_PREFIX)
        and all(_is_int(params.get(name)) for name in _COUNT_FIELDS)
        and 0 < params["remote_port"] <= _MAX_PORT
        and params["tp_size"] > 0
        and (_is_int(expiry) or (isinstance(expiry, float) and math.isfinite(expiry)))
        # One group: models with several kinds of attention are refused at start.
        and _is_list(groups)
        and len(groups) == 1
        and _is_list(groups[0])
        and all(_is_int(block_id) and block_id >= 0 for block_id in groups[0])
        and isinstance(ttl_s, int | float)
        and not isinstance(ttl_s, bool)
        and isinstance(issued_for, Mapping)
        and issued_for.get("version") == TICKET_VERSION
        and isinstance(issued_for.get("prompt_hash"), str)
        and isinstance(issued_for.get("fingerprint"), str)
        and isinstance(issued_for.get("nonce"), str)
    )


def _is_int(value: Any) -> bool:
    # bool is an int to Python, not to a protocol.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
