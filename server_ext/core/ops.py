"""The arguments of a home's operations: a closed table of names and types, checked at the door.

What comes in has crossed a process boundary as msgpack. `read_arg` either returns what the operation takes,
or refuses by name, so that no operation stops half-way over a bad value.
"""

from array import array
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from bidikv_sdk.wire import ROUTES

from .cost import Observed
from .errors import InvalidRequest

if TYPE_CHECKING:
    from bidikv_sdk.wire import Route

Reader: TypeAlias = Callable[[str, Any], Any]
"""Takes the field's name and value (None where absent), returns what the operation gets."""

_ID_BYTES: Final = 4


def text(name: str, value: Any) -> str:
    """Read a string."""
    if isinstance(value, str):
        return value
    raise _wrong(name, value, "a string")


def count(name: str, value: Any) -> int:
    """Read an integer that is not negative."""
    # bool is an int to Python, not to the protocol.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _wrong(name, value, "an integer, 0 or more")


def seconds(name: str, value: Any) -> float:
    """Read a number of seconds that is not negative."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise _wrong(name, value, "a number of seconds, 0 or more")


def flag(name: str, value: Any) -> bool:
    """Read a boolean."""
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "true or false")


def data(name: str, value: Any) -> bytes:
    """Read opaque bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _wrong(name, value, "bytes")


def ids(name: str, value: Any) -> "array[int]":
    """Read token ids [num_tokens], packed as little-endian int32."""
    packed = data(name, value)
    if len(packed) % _ID_BYTES:
        msg = f"{name} has {len(packed)} bytes: give token ids as packed int32, {_ID_BYTES} bytes each"
        raise InvalidRequest(msg, param=name)
    token_ids = array("i")
    token_ids.frombytes(packed)
    return token_ids


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Read a list of strings."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _wrong(name, value, "a list of strings")


def route(name: str, value: Any) -> "Route":
    """Read a route."""
    if value in ROUTES:
        return cast("Route", value)
    raise _wrong(name, value, f"one of {', '.join(ROUTES)}")


def observed(name: str, value: Any) -> Observed:
    """Read what a turn has shown."""
    if isinstance(value, Mapping):
        counts = {key: count(key, value.get(key)) for key in ("prompt_tokens", "reused_tokens", "fetched_tokens")}
        times = {key: optional(seconds, None)(key, value.get(key)) for key in ("prefill_s", "fetch_s", "handover_s")}
        return Observed(
            **counts,
            **times,
            pair=optional(text, None)("pair", value.get("pair")),
            failed_pairs=optional(texts, ())("failed_pairs", value.get("failed_pairs")),
            is_read_failed=optional(flag, default=False)("is_read_failed", value.get("is_read_failed")),
        )
    raise _wrong(name, value, "an object")


def anything(name: str, value: Any) -> Any:  # noqa: ARG001 (a reader)
    """Hand on what the operation itself checks."""
    return value


def optional(reader: Reader, default: Any) -> Reader:
    """Return a reader of a field that may be absent or None."""
    return lambda name, value: default if value is None else reader(name, value)


_KEY: Final[dict[str, Reader]] = {"tenant": text, "session_id": text}

OPS: Final[Mapping[str, Mapping[str, Reader]]] = MappingProxyType(
    {
        "open": {
            **_KEY,
            "chunk": optional(data, b""),
            "turn": optional(count, 0),
            "replace": optional(flag, default=False),
        },
        "load": {
            **_KEY,
            "turn": optional(count, None),
            "idempotency_key": optional(text, ""),
            "parent_id": optional(text, None),
        },
        "begin": {
            **_KEY,
            "turn": count,
            "idempotency_key": optional(text, ""),
            "prompt_ids": ids,
            "fingerprint": text,
            "route": route,
            "prefill_urls": optional(texts, ()),
            "revision": optional(count, None),
            "num_kept": optional(count, None),
        },
        "settle": {
            "nonce": text,
            "num_tokens_kept": count,
            "token_ids": ids,
            "chunk": data,
            "reply": data,
            "ttl_s": anything,
            "ended_by": optional(text, "stop"),
            "observed": optional(observed, None),
            "report": optional(data, b""),
        },
        "abandon": {"nonce": text, "return_ticket": flag},
        "return_ticket": {"ticket_id": text, "read_age_s": optional(seconds, None)},
        "extend": {**_KEY, "ttl_s": anything},
        "release": _KEY,
        "fork": {**_KEY, "child_id": text, "at_turn": optional(count, None), "ttl_s": anything},
        "rewind": {**_KEY, "turn": count},
        "end": _KEY,
        "get": _KEY,
        "list": {
            "tenant": optional(text, None),
            "limit": optional(count, None),
            "after": optional(text, None),
        },
        "metrics": {},
    }
)
"""Every operation, and the fields of its argument."""


def read_arg(op: str, arg: Any) -> dict[str, Any]:
    """Return the checked fields of an operation's argument.

    Raises:
        InvalidRequest: the operation or a field is unknown, or a field is missing or wrongly typed.
    """
    fields = OPS.get(op)
    if fields is None:
        msg = f"operation {op!r:.80} is unknown: use one of {', '.join(OPS)}"
        raise InvalidRequest(msg)
    if not isinstance(arg, Mapping):
        raise _wrong(op, arg, "an object")
    for name in arg:
        if name not in fields:
            msg = f"operation {op!r} has no field {name!r:.80}: use {', '.join(fields)}"
            raise InvalidRequest(msg, param=str(name))
    return {name: reader(name, arg.get(name)) for name, reader in fields.items()}


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequest:
    # The type only: a value may be a prompt.
    msg = f"{name} is {'missing' if value is None else type(value).__name__}: give {wanted}"
    return InvalidRequest(msg, param=name)
