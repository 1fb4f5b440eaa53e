"""Requests as data, and replies read back: pure, no I/O, no clock.

A `Call` is built here or in `_state`, sent by `_transport`, and its `Reply` read here.
May import `_errors`, `wire` and `_types`.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import quote

from bidikv_sdk._errors import APIStatusError, InvalidResponse, ServerExtensionMissing, error_class_of
from bidikv_sdk.wire import PROTOCOL, ErrorInfo, ProtocolError, SessionInfo, sessions_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from bidikv_sdk._types import ChatCompletion, Delta, Message
    from bidikv_sdk.wire import CacheReport

_ResultT = TypeVar("_ResultT")
TurnParts: TypeAlias = "tuple[Message, SessionInfo, CacheReport]"

_MAX_ID_LENGTH: Final = 256
# Sessions in one reply to the list call: a few hundred kilobytes.
_PAGE: Final = 500
# The SDK sets these itself; a chat parameter of that name would break the turn.
_RESERVED_PARAMETERS: Final = frozenset({"session_id", "turn", "messages", "stream", "bidikv"})


@dataclass(frozen=True, slots=True)
class Call:
    """One request, complete but for the base URL and the client's own headers."""

    method: str
    path: str
    """Relative to the base URL, quoted, without a leading slash."""
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    """Hand the reply over before its body has arrived."""
    timeout_s: float | None = None
    """None: the client's."""
    max_retries: int | None = None
    """None: the client's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply with a status below 400."""

    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def request_id(self) -> str | None:
        """`X-Request-Id` of the reply."""
        return self.headers.get("x-request-id")


def session_call(
    method: str, session_id: str, verb: str | None = None, *, fields: Mapping[str, Any] | None = None, **options: Any
) -> Call:
    """Build a control call; the id goes into header and body, because routers hash the two apart.

    Fields of the body that are None are left to the server.
    """
    path = f"sessions/{quote(session_id, safe='')}" + (f"/{verb}" if verb else "")
    body: dict[str, Any] = {"session_id": session_id, "bidikv": bidikv_object()}
    body |= {name: value for name, value in (fields or {}).items() if value is not None}
    return Call(method, path, body if method == "POST" else None, {"X-Session-ID": session_id}, **options)


def turn_call(body: Mapping[str, Any], *, stream: bool, timeout_s: float | None) -> Call:
    """Build the call of a turn; its key is the same in every try of this turn, and in no other one."""
    session_id = body["session_id"]
    key = f"{session_id}:{body['turn']}:{secrets.token_urlsafe(8)}"
    return Call(
        "POST",
        f"sessions/{quote(session_id, safe='')}/turns",
        {**body, "stream": stream},
        {"X-Session-ID": session_id, "Idempotency-Key": key},
        stream=stream,
        timeout_s=timeout_s,
    )


def open_call(session_id: str, messages: Sequence[Message], tools: object, turn: int, *, replace: bool) -> Call:
    """Build the call that opens a session from the history of its `turn` completed turns."""
    body = {
        "session_id": session_id,
        "messages": list(messages),
        **({} if tools is None else {"tools": tools}),
        "turn": turn,
        "replace": replace,
        "bidikv": bidikv_object(),
    }
    return Call("POST", "sessions", body, {"X-Session-ID": session_id})


def bidikv_object(*, route: str | None = None, ttl_s: float | None = None) -> dict[str, Any]:
    """Return the request's `bidikv` object; what is None is left to the server."""
    given = {"route": route, "ttl_s": ttl_s}
    return {"protocol": PROTOCOL, **{name: value for name, value in given.items() if value is not None}}


def check_session_id(session_id: str) -> str:
    """Return the id.

    Raises:
        ValueError: it cannot travel in a header and in a path.
    """
    travels = session_id.isascii() and session_id.isprintable() and session_id == session_id.strip()
    # A quoted slash is a slash again before the server looks for the route.
    if not travels or "/" in session_id or session_id in {"", ".", ".."} or len(session_id) > _MAX_ID_LENGTH:
        msg = f"session id {session_id!r:.80} must be 1 to {_MAX_ID_LENGTH} printable ASCII characters but /"
        raise ValueError(msg)
    return session_id


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse chat parameters that the SDK sets itself.

    Raises:
        TypeError: one of them is given.
    """
    for name in sorted(_RESERVED_PARAMETERS & parameters.keys()):
        msg = f"the SDK sets {name!r} itself" + ("; use session.stream() to stream" if name == "stream" else "")
        raise TypeError(msg)


def messages_of(delta: Delta) -> list[Message]:
    """Return the delta as new message dicts.

    Raises:
        TypeError: it is neither text, nor a message, nor a list of messages.
        ValueError: the list is empty.
    """
    if isinstance(delta, str):
        return [{"role": "user", "content": delta}]
    items = [delta] if hasattr(delta, "keys") else delta
    if not isinstance(items, list | tuple) or not all(hasattr(item, "keys") for item in items):
        msg = f"a delta is a str, a message dict or a list of them, got {type(delta).__name__}"
        raise TypeError(msg)
    if not items:
        msg = "a delta needs at least one message, got an empty list"
        raise ValueError(msg)
    return [dict(cast("Mapping[str, Any]", item)) for item in items]


def read_session(reply: Reply) -> SessionInfo:
    """Read the reply to a control call.

    Raises:
        InvalidResponse: it breaks the protocol.
    """
    data = _json_object(reply)
    return _checked(lambda: SessionInfo.from_json(data.get("bidikv")), reply, data)


def pages() -> Generator[Call, Reply, list[SessionInfo]]:
    """Yield the calls that list the caller's sessions, page by page, take their replies, and return all.

    Raises:
        InvalidResponse: a reply breaks the protocol.
    """
    found: list[SessionInfo] = []
    path = f"sessions?limit={_PAGE}"
    reply = yield Call("GET", path)
    while True:
        data = _json_object(reply)
        page = _checked(partial(sessions_from_json, data), reply, data)
        found += page
        if not page or data.get("has_more") is not True:
            return found
        reply = yield Call("GET", f"{path}&after={quote(page[-1].session, safe='')}")


def read_completion(reply: Reply) -> ChatCompletion:
    """Read the reply to a turn; what it holds is checked by `turn_parts`.

    Raises:
        InvalidResponse: it is no JSON object.
    """
    return cast("ChatCompletion", _json_object(reply))


def turn_parts(completion: ChatCompletion, reply: Reply) -> TurnParts:
    """Return the assistant's message, empty fields left out, the `bidikv` object, and its cache report.

    Raises:
        InvalidResponse: one of them is missing.
    """

    def read() -> TurnParts:
        choices = completion.get("choices")
        if not choices or not isinstance(choices[0].get("message"), dict):
            msg = "choices[0].message is missing"
            raise ProtocolError(msg)
        info = SessionInfo.from_json(completion.get("bidikv"))
        if info.cache is None:
            msg = "bidikv.cache is null in a turn's reply"
            raise ProtocolError(msg)
        # Nulls and empty lists say nothing, and a history that is sent again should not grow by them.
        kept = {name: value for name, value in choices[0]["message"].items() if value not in (None, [], {})}
        return {"role": "assistant", "content": None, **kept}, info, info.cache

    return _checked(read, reply, completion)


def error_of(status: int, headers: Mapping[str, str], content: bytes, wall_s: float) -> APIStatusError:
    """Return what an error reply means; `wall_s` is Unix time, for a `Retry-After` that is a date."""
    try:
        body: Any = json.loads(content)
    except ValueError:
        body = content.decode("utf-8", "replace")
    error = body.get("error") if isinstance(body, dict) else None
    try:
        info = ErrorInfo.from_json(error)
    except ProtocolError:
        return _foreign_error(status, headers, body, wall_s)
    return error_class_of(status, info.code)(
        info.message,
        status=status,
        code=info.code,
        request_id=headers.get("x-request-id"),
        body=body,
        param=info.param,
        retry_after_s=_retry_after_s(headers, wall_s) if info.retry_after_s is None else info.retry_after_s,
        expected_turn=info.expected_turn,
        reason=info.reason,
    )


def _foreign_error(status: int, headers: Mapping[str, str], body: Any, wall_s: float) -> APIStatusError:
    """Return the error for a reply that did not come from a bidikv route."""
    error_class = error_class_of(status, None)
    message = f"the server said {body!r:.200}"
    if error_class is ServerExtensionMissing:
        message = (
            "no bidikv routes at this base URL: install bidikv-sdk beside vLLM and start it with"
            " VLLM_PLUGINS=bidikv,bidikv_http, and let the base URL end in /v1; " + message
        )
    retry_after_s = _retry_after_s(headers, wall_s)
    request_id = headers.get("x-request-id")
    return error_class(message, status=status, request_id=request_id, body=body, retry_after_s=retry_after_s)


def _retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - wall_s, 0.0)
    except ValueError:
        return None


def _json_object(reply: Reply) -> dict[str, Any]:
    try:
        data = json.loads(reply.content)
    except ValueError as error:
        msg = f"the reply is not JSON: {error}"
        raise InvalidResponse(
            msg, request_id=reply.request_id, body=reply.content.decode("utf-8", "replace")
        ) from error
    if not isinstance(data, dict):
        msg = f"the reply is not a JSON object but {type(data).__name__}"
        raise InvalidResponse(msg, request_id=reply.request_id, body=data)
    return data


def _checked(read: Callable[[], _ResultT], reply: Reply, body: object) -> _ResultT:
    try:
        return read()
    except ProtocolError as error:
        raise InvalidResponse(str(error), request_id=reply.request_id, body=body) from error
