"""A session's transcript as the home keeps it, and where a request goes on in it. Pure.

A turn of the session routes goes on at the end (`end`). A client that sends its whole history goes on at the last turn
up to which that history is the session's own (`find`): what D generated then is continued by its ids, whatever stands
in the way of an equal text (empty fields left out, arguments written in another way). What comes behind is new.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from server_ext.http.render import History

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bidikv_sdk.wire import Reason

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
        record: what the home's op `load` returned.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.turn: int = record["info"]["turn"]
        self.revision: int = record["revision"]
        self._chunks: list[dict[str, Any]] = [json.loads(chunk) if chunk else {} for chunk in record["transcript"]]
        self._id_counts: list[int] = record["id_counts"]
        self._token_ids = array("i", record["token_ids"])

    def end(self, delta: list[Message], tools: list[dict[str, Any]] | None) -> Place:
        """Go on at the end; tools stay until others are given."""
        changed: Reason | None = None
        known = self._tools()
        if self.turn and tools is not None and tools != (known or []):
            changed = "tools_changed"
        tools = known if tools is None else tools
        return Place(self._history(len(self._chunks)), len(self._chunks), delta, tools, changed)

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
        changed: Reason | None = None
        if self.turn and tools != (self._tools() or []):
            changed = "tools_changed"
        elif num_kept < len(known):
            changed = _first_change(given, [message for chunk in known for message in chunk])
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

    def _tools(self) -> list[dict[str, Any]] | None:
        return next((chunk["tools"] for chunk in reversed(self._chunks) if chunk.get("tools") is not None), None)


def _first_change(given: Sequence[Message], known: Sequence[Message]) -> Reason:
    nothing: Message = {}
    pairs = zip_longest(given, known, fillvalue=nothing)
    changed = next((pair for pair in pairs if pair[0] != pair[1]), (nothing,))
    is_system = any(message.get("role") in {"system", "developer"} for message in changed)
    return "system_changed" if is_system else "messages_changed"


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
