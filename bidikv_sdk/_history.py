"""A session's history by turns, so that it can be cut between two of them. Pure; may import `_types` only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv_sdk._types import Message, Tool


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One completed turn, and what the session was before it."""

    delta: list[Message]
    reply: Message
    pending: list[Message]
    """The first messages of the delta: those that the session put before the caller's own."""
    tools: list[Tool] | None
    tools_sent: bool


def messages_of_turns(records: Sequence[TurnRecord]) -> list[Message]:
    """Return all messages of completed turns, in order."""
    return [message for record in records for message in (*record.delta, record.reply)]


def split_turns(
    messages: Sequence[Message], num_turns: int | None, tools: list[Tool] | None
) -> tuple[list[TurnRecord], list[Message]]:
    """Cut a history into turns, each ending with a reply of the assistant.

    Args:
        messages: The history.
        num_turns: How many turns it contains, where assistant messages of the first ones were given to the model
            instead of generated; None: every assistant message ends a turn.
        tools: The session's.

    Returns:
        The turns, and the messages behind the last one.

    Raises:
        ValueError: There are fewer assistant messages than turns.
    """
    ends = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if num_turns is not None:
        if not 0 <= num_turns <= len(ends):
            msg = f"turn is {num_turns}, but the transcript has {len(ends)} assistant messages, one for each turn"
            raise ValueError(msg)
        ends = ends[len(ends) - num_turns :]
    records = []
    start = 0
    for end in ends:
        delta = list(messages[start:end])
        # Going back to before the first turn leaves the system prompt, as in a session that began with one.
        system = [] if start else list(takewhile(lambda m: m.get("role") in {"system", "developer"}, delta))
        records.append(TurnRecord(delta, messages[end], system, tools, tools_sent=tools is None or start > 0))
        start = end + 1
    return records, list(messages[start:])
