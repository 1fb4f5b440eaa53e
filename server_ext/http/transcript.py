"""A session's transcript as the home keeps it, and where a request goes on in it. Pure.

A turn of the session routes goes on at the end (`end`). A client that sends its whole history goes on at the last turn
up to which that history is the session's own (`find`): what D generated then is continued by its ids, whatever stands
in the way of an equal text (empty fields left out, arguments written in another way). What comes behind is new.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from server_ext.http.render import History

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bidikv_sdk.wire import Reason
    from server_ext.core.session_record import Session

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn goes on.

    - `history`: what it continues.
    - `num_kept`: the chunks of the transcript that this is.
    - `delta`: the turn's new messages.
    - `tools`: of the turn, its own or the session's.
    - `changed`: why it does not continue all that the session has; None where it does.
    """

    history: History
    num_kept: int
    delta: list[Message]
    tools: list[dict[str, Any]] | None
    changed: Reason | None


class Transcript:
    """The chunks of a session's transcript and the ids that belong to them.

    Args:
        record: of the session.
    """

    def __init__(self, record: Session) -> None:
        self._turn = record.turn
        self._chunks = [json.loads(chunk) if chunk else {} for chunk in record.transcript]
        self._replaced = [json.loads(chunk) if chunk else {} for chunk in record.replaced]
        self._id_counts = record.id_counts
        self._token_ids = record.token_ids

    def end(self, delta: list[Message], tools: list[dict[str, Any]] | None) -> Place:
        """Go on at the end; tools stay until others are given."""
        tools = _tools_of(self._chunks) if tools is None else tools
        history = self._history(len(self._chunks))
        changed = self._changed([*history.messages, *delta] if self._replaced else None, tools)
        if changed is None and any(_is_system(message) for message in delta):
            changed = "system_changed"  # where the template moves it to the front
        return Place(history, len(self._chunks), delta, tools, changed)

    def find(self, messages: list[Message], tools: list[dict[str, Any]]) -> Place:
        """Go on where a whole history leaves the session's own; at least its last message is new."""
        given = [_said(message) for message in messages]
        known = [[_said(message) for message in chunk.get("messages", ())] for chunk in self._chunks]
        num_kept = num_messages = 0
        for chunk in known:
            end = num_messages + len(chunk)
            if end >= len(given) or given[num_messages:end] != chunk:
                break
            num_kept, num_messages = num_kept + 1, end
        changed = self._changed(messages if self._replaced or num_kept < len(known) else None, tools)
        return Place(self._history(num_kept), num_kept, messages[num_messages:], tools, changed)

    def _history(self, num_chunks: int) -> History:
        chunks = self._chunks[:num_chunks]
        last = chunks[-1] if chunks else {}
        return History(
            messages=[message for chunk in chunks for message in chunk.get("messages", ())],
            token_ids=self._token_ids[: self._id_counts[num_chunks - 1] if num_chunks else 0],
            pending_text=last.get("pending_text", ""),
            prompt_hash=last.get("prompt_hash", ""),
        )

    def _changed(self, messages: Sequence[Message] | None, tools: list[dict[str, Any]] | None) -> Reason | None:
        """Say how a history differs from that which the session's lease was computed from; None where it continues it.

        Args:
            messages: the new history; None where it is known to continue the old one.
            tools: the new ones.
        """
        before = self._replaced or self._chunks
        if self._turn and (tools or []) != (_tools_of(before) or []):
            return "tools_changed"
        if messages is None:
            return None
        return _first_change(messages, [message for chunk in before for message in chunk.get("messages", ())])


def _tools_of(chunks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    return next((chunk["tools"] for chunk in reversed(chunks) if chunk.get("tools") is not None), None)


def _is_system(message: Message) -> bool:
    return message.get("role") in {"system", "developer"}


def _first_change(messages: Sequence[Message], before: Sequence[Message]) -> Reason:
    nothing: Message = {}
    pairs = zip_longest(map(_said, messages), map(_said, before), fillvalue=nothing)
    changed = next((pair for pair in pairs if pair[0] != pair[1]), (nothing,))
    return "system_changed" if any(map(_is_system, changed)) else "messages_changed"


def _said(message: Message) -> Message:
    """Return what a message says: clients send back fields that say nothing, or leave out those that did."""
    said = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if isinstance(said.get("tool_calls"), list):
        said["tool_calls"] = [_called(call) for call in said["tool_calls"]]
    return said


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):  # the model's own bad JSON is equal as a text or not at all
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return call.get("id"), function.get("name"), arguments
