"""A turn's body, checked: what is ours is taken out, what cannot work is refused by name, the rest is vLLM's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bidikv_sdk.wire import PROTOCOL, ROUTES
from server_ext.engine.compat import ChatCompletionRequest
from server_ext.http.errors import Refused, vllm_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_sdk.wire import Route

_MAX_SESSION_ID_CHARS = 256
_MAX_PAGE = 1000
_MAX_TURN = 1 << 31  # no session gets there, and all that count turns can hold it
# Fields that would change what the session's prompt is, or reach past it, each with the value that means the same as
# leaving it out. `cache_salt` comes from the tenant.
_REFUSED_FIELDS = {
    "add_generation_prompt": True,
    "cache_salt": None,
    "continue_final_message": False,
    "ec_transfer_params": None,
    "echo": False,
    "kv_transfer_params": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "vllm_xargs": None,
}
_OWN_FIELDS = frozenset({"bidikv", "session_id", "turn", "messages", "tools", "stream", "stream_options"})


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as its caller asked for it.

    - `turn`: its number, from 1; None where the request holds a whole history, as any OpenAI client sends it.
    - `key`: idempotency key; equal keys of the same turn are the same call.
    - `messages`: at least one OpenAI message; the delta, or the whole history.
    - `tools`: None where the session's tools stay as they are.
    - `route`: None where the caller leaves it to the server's setting.
    - `ttl_s`: of the lease after this turn; None for the server's default.
    - `stream`: reply as server-sent events.
    - `chat`: the remaining chat parameters, unchecked.
    - `stream_options`: of vLLM's stream, to which usage is always added.
    - `wants_usage`: the caller's stream ends with a chunk that has usage and no choices.
    """

    turn: int | None
    key: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    route: Route | None
    ttl_s: float | None
    stream: bool
    chat: dict[str, Any]
    stream_options: dict[str, Any] = field(default_factory=dict)
    wants_usage: bool = True

    @classmethod
    def parse(cls, body: dict[str, Any], *, key: str) -> TurnRequest:
        """Check a turn's body.

        Raises:
            Refused: `invalid_request`, `unsupported_parameter` or `protocol_mismatch`, naming the field.
        """
        return cls._of(
            body,
            turn=turn_of(body.get("turn"), least=1, meaning="the number of this turn: completed turns + 1"),
            key=key,
            tools=tools_of(body),
        )

    @classmethod
    def parse_whole(cls, body: dict[str, Any]) -> TurnRequest:
        """Check the body of a chat completion, which holds the whole history and all tools.

        Raises:
            Refused: as `parse`: a session cannot serve it.
        """
        asked = body.get("stream_options") or {}
        wants_usage = bool(asked.get("include_usage"))
        extra = {name: value for name, value in (body.get("vllm_xargs") or {}).items() if name != "session_id"}
        return cls._of(
            {**body, "vllm_xargs": extra or None},
            turn=None,
            key="",
            tools=tools_of(body) or [],
            stream_options=asked if wants_usage else {},
            wants_usage=wants_usage,
        )

    @classmethod
    def _of(cls, body: dict[str, Any], **parts: Any) -> TurnRequest:
        options = options_of(body)
        for name, unset in _REFUSED_FIELDS.items():
            if body.get(name) is not None and body[name] is not unset:
                msg = f"{name} is not supported in a session turn; leave it out"
                raise Refused(msg, code="unsupported_parameter", param=name)
        if body.get("n") not in (None, 1):
            msg = f"n is {body['n']!r:.80}, but a session continues with one reply; leave it out or open more sessions"
            raise Refused(msg, code="unsupported_parameter", param="n")
        route = options.get("route")
        if route is not None and route not in ROUTES:
            msg = f"bidikv.route is {route!r:.80}; give one of {', '.join(ROUTES)}"
            raise Refused(msg, param="bidikv.route")
        return cls(
            messages=messages_of(body, required=True),
            route=route,
            ttl_s=ttl_of(options.get("ttl_s"), "bidikv.ttl_s"),
            stream=flag_of(body, "stream"),
            chat={k: v for k, v in body.items() if k not in _OWN_FIELDS and k not in _REFUSED_FIELDS},
            **parts,
        )

    def to_vllm(self, tools: list[dict[str, Any]] | None, *, cache_salt: str | None) -> ChatCompletionRequest:
        """Build vLLM's request of this turn.

        Args:
            tools: of the session.
            cache_salt: of D's prefix cache.

        Raises:
            Refused: `invalid_request`, in vLLM's words.
        """
        # The usage chunk of a stream is the one that carries our report.
        options = {**self.stream_options, "include_usage": True}
        stream = {"stream": True, "stream_options": options} if self.stream else {}
        with vllm_errors():
            try:
                return ChatCompletionRequest(
                    messages=self.messages, tools=tools or None, cache_salt=cache_salt, **self.chat, **stream
                )
            except ValidationError as error:
                first = error.errors()[0]
                param = ".".join(str(part) for part in first["loc"][:2])
                msg = f"{param}: {first['msg']}" if param else first["msg"]
                raise Refused(msg, param=param or None) from error
            except (AttributeError, LookupError, TypeError) as error:
                # vLLM's own checks come before pydantic's, and trip over values of a wrong type.
                msg = f"a chat parameter has the wrong type ({error}); see the OpenAI API"
                raise Refused(msg) from error


def options_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request's `bidikv` object.

    Raises:
        Refused: it is no object, or speaks another protocol.
    """
    options = body.get("bidikv", {})
    if not isinstance(options, dict):
        msg = f"bidikv is {options!r:.80}; give an object like {{'protocol': {PROTOCOL}}}"
        raise Refused(msg, param="bidikv")
    protocol = options.get("protocol", PROTOCOL)
    if protocol != PROTOCOL:
        msg = f"this server speaks protocol {PROTOCOL}, the request says {protocol!r:.80}; upgrade the older side"
        raise Refused(msg, code="protocol_mismatch", param="bidikv.protocol")
    return options


def messages_of(body: Mapping[str, Any], *, required: bool) -> list[dict[str, Any]]:
    """Return a body's messages.

    Raises:
        Refused: they are no list of objects with a role, or hold content other than text.
    """
    messages = body.get("messages")
    if messages is None and not required:
        return []
    if not isinstance(messages, list) or (required and not messages):
        msg = f"messages is {messages!r:.80}; give a list of at least one chat message"
        raise Refused(msg, param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            msg = f"messages[{i}] is {message!r:.80}; give an object with a role"
            raise Refused(msg, param=f"messages[{i}]")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            msg = f"messages[{i}].content has a part that is not text; sessions carry text only"
            raise Refused(msg, code="unsupported_parameter", param=f"messages[{i}].content")
        if content is not None and not isinstance(content, str | list):
            msg = f"messages[{i}].content is {content!r:.80}; give a string, text parts or null"
            raise Refused(msg, param=f"messages[{i}].content")
        if not all(isinstance(part.get("text"), str) for part in parts):
            msg = f"messages[{i}].content has a text part without text; give each a string"
            raise Refused(msg, param=f"messages[{i}].content")
    return messages


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a body's tools, None where it has none.

    Raises:
        Refused: they are no list of objects.
    """
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        msg = f"tools is {tools!r:.80}; give a list of OpenAI tool definitions"
        raise Refused(msg, param="tools")
    return tools


def turn_of(value: Any, *, least: int, meaning: str) -> int:
    """Return a number of turns.

    Raises:
        Refused: it is no integer from `least` on.
    """
    # bool is an int to Python, not to the protocol.
    if type(value) is not int or not least <= value <= _MAX_TURN:
        msg = f"turn is {value!r:.80}; give {meaning}"
        raise Refused(msg, param="turn")
    return value


def flag_of(body: Mapping[str, Any], name: str) -> bool:
    """Return a body's flag, False where it has none.

    Raises:
        Refused: it is neither true nor false.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        msg = f"{name} is {value!r:.80}; give true or false"
        raise Refused(msg, param=name)
    return bool(value)


def ttl_of(value: Any, param: str) -> float | None:
    """Return a time to live in seconds, None where none is given.

    Raises:
        Refused: it is no number above 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        msg = f"{param} is {value!r:.80}; give a number of seconds above 0"
        raise Refused(msg, param=param)
    return float(value)


def limit_of(value: str | None) -> int | None:
    """Return how many sessions a page of the list may have, None where all are asked for.

    Raises:
        Refused: it is no number from 1 to 1000.
    """
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= _MAX_PAGE:
        msg = f"limit is {value!r:.80}; give a number from 1 to {_MAX_PAGE}"
        raise Refused(msg, param="limit")
    return int(value)


def is_session_id(value: Any) -> bool:
    """Tell whether a value can be the id of a session."""
    return isinstance(value, str) and 0 < len(value) <= _MAX_SESSION_ID_CHARS


def child_id_of(body: Mapping[str, Any]) -> str:
    """Return the id that a fork is to have.

    Raises:
        Refused: it is none.
    """
    child_id = body.get("child_id")
    if not is_session_id(child_id):
        msg = f"child_id is {child_id!r:.80}; give the new session's id, 1 to {_MAX_SESSION_ID_CHARS} characters"
        raise Refused(msg, param="child_id")
    return str(child_id)


def session_id_of(path_id: str, body: Mapping[str, Any], header_id: str | None) -> str:
    """Return the session id of a call, which names it in path, header and body alike.

    Raises:
        Refused: the three differ, or the id is too long.
    """
    for given, param in ((body.get("session_id"), "session_id"), (header_id, "X-Session-ID")):
        if given is not None and given != path_id:
            msg = f"{param} is {given!r:.80}, but the path names session {path_id!r:.80}; send the same id everywhere"
            raise Refused(msg, param=param)
    if not is_session_id(path_id):
        msg = f"the session id has {len(path_id)} characters; give 1 to {_MAX_SESSION_ID_CHARS}"
        raise Refused(msg, param="session_id")
    return path_id
