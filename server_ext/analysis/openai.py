"""Parses OpenAI-style request logs: one JSON object a line, with messages or token ids, and times.

The body may lie at the top or under `request`, `body`, `kwargs` or `input`, the reply under `response` or
`output`; chat, completion, Responses and Anthropic bodies are understood. `FIELDS` is the list of names.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any, Final

import msgspec

from .problems import Problems
from .requests import (
    BYTES_PER_TOKEN,
    CHUNK_TOKENS,
    MAX_TOKENS,
    Kind,
    Part,
    Request,
    chain_bytes,
    pack_ids,
    reply_fingerprint,
)

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("request", "body", "kwargs", "request_body", "input"),
    "reply": ("response", "output", "response_body", "completion"),
    "session": ("session_id", "conversation_id", "thread_id", "x-session-id", "x-correlation-id"),
    "request_id": ("request_id", "id", "custom_id", "x-request-id"),
    "start": ("timestamp", "start_time", "started_at", "time", "ts", "t", "created_at", "created", "request_time"),
    "end": ("end_time", "ended_at", "finished_at", "completed_at"),
    "duration_s": ("duration_s", "latency_s"),
    "duration_ms": ("duration_ms", "latency_ms"),
    "duration": ("duration", "latency", "e2e_latency"),
    "ttft_s": ("ttft_s",),
    "ttft_ms": ("ttft_ms",),
    "ttft": ("ttft",),
    "prompt_tokens": ("prompt_tokens", "num_prompt_tokens"),
    "input_tokens": ("input_tokens",),
    "output_tokens": ("completion_tokens", "output_tokens", "num_output_tokens"),
    "cached_tokens": ("cached_tokens",),
    "cache_read_tokens": ("cache_read_input_tokens",),
    "cache_write_tokens": ("cache_creation_input_tokens",),
}
"""What is looked for, under which names; the first that is there counts."""

PROMPT_NAMES: Final = ("messages", "prompt", "prompt_token_ids", "input_ids", "input")
_KINDS: Final = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "assistant": Kind.ASSISTANT,
    "tool": Kind.TOOL,
    "function": Kind.TOOL,
    "function_call_output": Kind.TOOL,
    "function_call": Kind.ASSISTANT,
    "reasoning": Kind.ASSISTANT,
}
# Seconds since 1970 stay below the first for 3000 years; milliseconds and microseconds lie in between.
_UNIT_LIMITS: Final = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6))
# What names no unit is in seconds, as long as a request may take so many: beyond, it may as well be milliseconds.
_MAX_BARE_S: Final = {"duration": 600.0, "ttft": 60.0}

_Fields = Mapping[str, msgspec.Raw]
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TOOL_ENDS: Final = frozenset({"tool_calls", "function_call", "tool_use"})
_IDS: Final = msgspec.json.Decoder(list[int])
_EMPTY: Final = frozenset({b"null", b"[]", b'""'})


class _Head(msgspec.Struct):
    """What tells a message's kind; the rest is skipped over."""

    role: Any = None
    type: Any = None


_HEAD: Final = msgspec.json.Decoder(_Head)


def is_request(fields: _Fields) -> bool:
    """Return whether an object's names are those of a request's log."""
    names = fields.keys()
    return not names.isdisjoint(PROMPT_NAMES) or not names.isdisjoint(FIELDS["body"]) or "usage" in names


def parse(where: str, fields: _Fields, problems: Problems) -> Request | None:
    """Return the request of a line; None, and a problem, where it has not one prompt or its length.

    Raises:
        msgspec.DecodeError, ValueError, TypeError, OverflowError: a value has not the type of its name.
    """
    outer = fields
    body = _object_at(outer, FIELDS["body"])
    reply = _object_at(outer, FIELDS["reply"])
    reply = _object_at(reply, ("body",)) or reply
    places = [outer, body, *(_object_at(f, ("metadata",)) for f in (outer, body))]
    places += [_lowered(_object_at(f, ("headers",))) for f in (outer, body)]
    usage = _object_at(outer, ("usage",)) or _object_at(reply, ("usage",))
    source = body if any(_is_there(body, name) for name in PROMPT_NAMES) else outer

    request = Request(
        where=where,
        session_id=_text(places, FIELDS["session"]),
        request_id=_text(places, FIELDS["request_id"]) or _text([reply], ("id",)),
        model=_text([body, outer, reply], ("model",)) or "",
        start_s=_time(places, FIELDS["start"]),
    )
    if request.start_s is None:
        request.start_s = _time([reply], ("created", "created_at"))
    num_bytes = _read_prompt(request, source)
    if num_bytes is None:
        problems.add("several_prompts", where)
        return None
    _read_counts(request, usage, places, num_bytes, partial(problems.add, "bad_count", where))
    if num_bytes == 0 and not request.num_prompt_tokens:
        problems.add("no_prompt", where)
        return None
    _read_times(request, places, partial(problems.add, "unknown_unit", where))
    _read_reply(request, reply)
    return request


def text_of_log_record(fields: _Fields) -> str:
    """Return a JSON log record as the line of text that it would have been."""
    return " ".join(filter(None, (_text([fields], names) for names in (("asctime",), ("message", "msg")))))


def parse_time(value: object) -> float | None:
    """Return seconds since 1970 of a number (s, ms, us or ns, told by its size) or an ISO 8601 text; else None."""
    if isinstance(value, str):
        try:
            return parse_time(float(value))
        except ValueError:
            return _parse_iso(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        return None
    for limit, factor in _UNIT_LIMITS:
        if abs(value) < limit:
            return value * factor
    return value * 1e-9


def _parse_iso(text: str) -> float | None:
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


# -------------------------------------------------------------------- the prompt


def _read_prompt(request: Request, fields: _Fields) -> int | None:
    """Read the prompt into the request; return its size in bytes (of ids: four a token).

    0 where there is none, None where there are several.
    """
    for name in ("prompt_token_ids", "input_ids"):
        if _is_there(fields, name):
            return _read_ids(request, _IDS.decode(fields[name]))
    parts = _tool_parts(fields)
    if _is_there(fields, "system"):
        parts.append(Part(Kind.SYSTEM, bytes(fields["system"])))
    if _is_there(fields, "instructions"):
        parts.append(Part(Kind.SYSTEM, bytes(fields["instructions"])))
    names = [name for name in ("messages", "input", "prompt") if _is_there(fields, name)]
    if not names:
        return 0
    raw = fields[names[0]]
    items = _items(raw)
    if items and (_first(items[0]) == b"[" or (_first(items[0]) == b'"' and names[0] != "messages")):
        # A completion may be asked for a list of prompts, be it of one.
        if len(items) > 1:
            return None
        raw, items = items[0], _items(items[0])
    if _first(raw) == b'"':
        # A text has no regions that could be told apart.
        text = msgspec.json.decode(raw, type=str).encode(errors="replace")
        request.data = b"".join([*(part.raw for part in parts), text])
    else:
        if items and _first(items[0]).isdigit():
            return _read_ids(request, _IDS.decode(raw))
        request.parts = [*parts, *(Part(_kind(item), bytes(item)) for item in items)]
        request.data = b"".join([part.raw for part in request.parts])
    request.chunk_ids = chain_bytes(request.data)
    return len(request.data)


def _read_ids(request: Request, token_ids: list[int]) -> int:
    request.data = pack_ids(token_ids)
    request.chunk_ids = chain_bytes(request.data)
    request.num_prompt_tokens = len(token_ids)
    return len(token_ids) * BYTES_PER_TOKEN


def _tool_parts(fields: _Fields) -> list[Part]:
    for name in ("tools", "functions"):
        if _is_there(fields, name):
            # In the order of the wire, also within a definition: sorting would hide what costs the most.
            return [Part(Kind.TOOL_DEF, bytes(item)) for item in _ITEMS.decode(fields[name])]
    return []


def _kind(raw: msgspec.Raw) -> Kind:
    if _first(raw) != b"{":
        return Kind.OTHER
    head = _HEAD.decode(raw)
    return _KINDS.get(str(head.role or head.type), Kind.OTHER)


def _read_counts(
    request: Request, usage: _Fields, places: list[_Fields], num_bytes: int, on_bad: Callable[[], None]
) -> None:
    """Read what was counted of the prompt, of what a cache had of it, and of the answer."""
    counts = [usage, *places]
    details = _object_at(usage, ("prompt_tokens_details", "input_tokens_details"))
    cached = _count([details, *counts], FIELDS["cached_tokens"], on_bad)
    num_read = _count(counts, FIELDS["cache_read_tokens"], on_bad)
    num_written = _count(counts, FIELDS["cache_write_tokens"], on_bad)
    # OpenAI's details are of the prompt's tokens; Anthropic counts beside its input what the cache gave and took.
    num_prompt = _num_prompt(counts, 0 if details else (num_read or 0) + (num_written or 0), on_bad)
    if not request.num_prompt_tokens:
        request.is_estimated = num_prompt is None
        request.num_prompt_tokens = num_bytes // BYTES_PER_TOKEN if num_prompt is None else num_prompt
        if num_bytes and num_prompt is not None:
            # What the engine counted, spread over the bytes.
            request.tokens_per_chunk = CHUNK_TOKENS * BYTES_PER_TOKEN / (num_bytes / num_prompt)
    cached = num_read if cached is None else cached
    if cached is not None and cached > request.num_prompt_tokens and not request.is_estimated:
        on_bad()
        cached = None
    # Of a prompt whose length is a guess, all of it may be cached; of a known one there cannot be more.
    request.num_cached_tokens = None if cached is None else min(cached, request.num_prompt_tokens)
    request.num_output_tokens = _count(counts, FIELDS["output_tokens"], on_bad) or 0


def _num_prompt(counts: list[_Fields], num_beside: int, on_bad: Callable[[], None]) -> int | None:
    """Return the tokens of the prompt, `num_beside` of them not in its input's count; None where it is not told."""
    num_prompt = _count(counts, FIELDS["prompt_tokens"], on_bad)
    if not num_prompt and (num_input := _count(counts, FIELDS["input_tokens"], on_bad)) is not None:
        num_prompt = num_input + num_beside
        if num_prompt > MAX_TOKENS:
            on_bad()
            return None
    # No prompt is of no tokens: gateways write 0 for what they do not know.
    return num_prompt or None


def _read_times(request: Request, places: list[_Fields], on_unknown: Callable[[], None]) -> None:
    request.ttft_s = _seconds(places, "ttft", on_unknown)
    request.end_s = _time(places, FIELDS["end"])
    if request.end_s is None and request.start_s is not None:
        duration_s = _seconds(places, "duration", on_unknown)
        if duration_s is not None:
            request.end_s = request.start_s + duration_s


def _seconds(places: list[_Fields], name: str, on_unknown: Callable[[], None]) -> float | None:
    """Return how long something took; None, and it is told, where nobody knows in which unit."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if (value := _number(places, FIELDS[f"{name}_{unit}"])) is not None:
            return value / per_second
    value = _number(places, FIELDS[name])
    if value is not None and value > _MAX_BARE_S[name]:
        on_unknown()
        return None
    return value


def _read_reply(request: Request, reply: _Fields) -> None:
    for place in (reply, *_objects_in(reply, "choices")):
        if (finish := _text([place], ("finish_reason", "stop_reason"))) is not None:
            request.ends_in_tool = finish in _TOOL_ENDS
        message = _object_at(place, ("message",)) or (place if "content" in place else {})
        if message:
            request.reply = message_fingerprint(message)
            if not request.num_output_tokens:
                size = len(memoryview(message["content"])) if "content" in message else 0
                request.num_output_tokens = size // BYTES_PER_TOKEN
            return


def message_fingerprint(message: _Fields) -> int:
    """Return the fingerprint of an assistant's message, in a reply or in a later prompt."""
    content, calls = (
        msgspec.json.decode(message[name]) if name in message else None for name in ("content", "tool_calls")
    )
    return reply_fingerprint(content, calls)


def part_fingerprint(part: Part) -> int | None:
    """Return the fingerprint of a part that is an assistant's message; None where it is no object."""
    try:
        return message_fingerprint(_OBJECT.decode(part.raw))
    except msgspec.DecodeError:
        return None


# -------------------------------------------------------------------- fields


def _is_there(fields: _Fields, name: str) -> bool:
    """Return whether there is something under a name: an empty value must not hide what another name has."""
    return name in fields and bytes(memoryview(fields[name])[:5]) not in _EMPTY


def _first(raw: msgspec.Raw) -> bytes:
    """Return the first character, which tells a JSON value's kind, without a copy of the rest."""
    return bytes(memoryview(raw)[:1])


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return what is in a list; nothing is in a text."""
    return [] if _first(raw) == b'"' else _ITEMS.decode(raw)


def _object_at(fields: _Fields, names: tuple[str, ...]) -> _Fields:
    for name in names:
        if name in fields and _first(fields[name]) == b"{":
            return _OBJECT.decode(fields[name])
    return {}


def _objects_in(fields: _Fields, name: str) -> list[_Fields]:
    if name not in fields or _first(fields[name]) != b"[":
        return []
    return [_OBJECT.decode(item) for item in _ITEMS.decode(fields[name]) if _first(item) == b"{"]


def _lowered(fields: _Fields) -> _Fields:
    return {name.lower(): value for name, value in fields.items()}


def _values(places: list[_Fields], names: tuple[str, ...]) -> Any:
    for name in names:
        for place in places:
            if _is_there(place, name):
                yield msgspec.json.decode(place[name])


def _text(places: list[_Fields], names: tuple[str, ...]) -> str | None:
    for value in _values(places, names):
        # An id of nobody would make one session of everybody.
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    return None


def _number(places: list[_Fields], names: tuple[str, ...]) -> float | None:
    for value in _values(places, names):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return float(value)
    return None


def _count(places: list[_Fields], names: tuple[str, ...], on_bad: Callable[[], None]) -> int | None:
    """Return the first value that can be a count of tokens; tell of each before it that cannot."""
    for value in _values(places, names):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return int(value)
        on_bad()
    return None


def _time(places: list[_Fields], names: tuple[str, ...]) -> float | None:
    for value in _values(places, names):
        if (time_s := parse_time(value)) is not None:
            return time_s
    return None
