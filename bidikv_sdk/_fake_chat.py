"""The chat route of a fake server: where a client's whole history goes on in what a session has. Pure.

A message is the session's own where it says the same: empty fields do not matter, nor how the arguments of a tool call
are written. What D's own route does with token ids happens here with messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk._fake_replies import count_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bidikv_sdk._types import Message
    from bidikv_sdk.wire import Reason

# A session cannot serve these: the completion is an ordinary one.
_REFUSED: Final = ("echo", "prompt_logprobs", "kv_transfer_params", "cache_salt", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history goes on: behind `num_turns` known ends of turns, with the reason why not behind the last one."""

    num_marks: int
    delta: list[Message]
    common_tokens: int
    changed: Reason | None


def is_servable(body: Mapping[str, Any]) -> bool:
    """Tell whether a session can serve a completion: one reply, text only, no parameter that sessions refuse."""
    parts = [part for message in body["messages"] for part in _parts(message)]
    is_text = all(part.get("type") == "text" for part in parts)
    return is_text and body.get("n") in {None, 1} and not any(body.get(name) for name in _REFUSED)


def place_of(given: Sequence[Message], known: Sequence[Message], marks: Sequence[int], *, same_tools: bool) -> Place:
    """Return where a history goes on.

    Args:
        given: all messages of the request.
        known: the session's.
        marks: number of the session's messages behind each turn that is known.
        same_tools: whether the request has the session's tools.
    """
    said, held = [_said(message) for message in given], [_said(message) for message in known]
    num_common = next((i for i, pair in enumerate(zip(said, held, strict=False)) if pair[0] != pair[1]), None)
    num_common = min(len(said), len(held)) if num_common is None else num_common
    # At least the last message is new.
    num_marks = sum(mark <= min(num_common, len(given) - 1) for mark in marks)
    kept = marks[num_marks - 1] if num_marks else 0
    changed: Reason | None = None
    if known and not same_tools:
        changed, num_common = "tools_changed", 0  # templates put tools first
    elif num_marks < len(marks):
        behind = [message for message in (*given[num_common:][:1], *known[num_common:][:1]) if message]
        is_system = any(message.get("role") in {"system", "developer"} for message in behind)
        changed = "system_changed" if is_system else "messages_changed"
    return Place(num_marks, list(given[kept:]), count_tokens(known[:num_common]), changed)


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _said(message: Message) -> Message:
    said = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if isinstance(said.get("tool_calls"), list):
        said["tool_calls"] = [_called(call) for call in said["tool_calls"]]
    return said


def _called(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = function.get("arguments")
    return call.get("id"), function.get("name"), arguments
