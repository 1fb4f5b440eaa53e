"""What a reader's worker tells D's worker when it has read a ticket: NIXL's note, on its way to the lease table.

The worker takes notes of tickets out of what stock code sees (to it they are of requests that nobody knows), and hands
them to the scheduler's side with the results of its step. A worker polls only while its engine steps, so on an idle D a
note waits; the conductor's own return, or the deadline, comes first then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.core.tickets import TICKET_ID_PREFIX
from server_ext.engine import compat

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = TICKET_ID_PREFIX.encode()


@dataclass(frozen=True, slots=True)
class ReadTickets(compat.KVConnectorWorkerMetadata):
    """Tickets that their readers have read, by id; from a worker to its scheduler."""

    ticket_ids: frozenset[str]

    def aggregate(self, other: ReadTickets) -> ReadTickets:
        """Return what both workers say."""
        # One reader and one worker on each side (others are refused at start-up): the first note is the last one.
        return ReadTickets(self.ticket_ids | other.ticket_ids)


class TicketNotes:
    """NIXL's `get_new_notifs`, without the notes of tickets, which it keeps until they are taken.

    Args:
        get_new_notifs: returns the new notes of each agent; one of a read is `<id>:<number of readers>`.
    """

    def __init__(self, get_new_notifs: Callable[[], dict[Any, list[bytes]]]) -> None:
        self._get_new_notifs = get_new_notifs
        self._ticket_ids: set[str] = set()

    def __call__(self) -> dict[Any, list[bytes]]:
        """Return the new notes of each agent that are not of tickets."""
        notes_by_agent = self._get_new_notifs()
        for notes in notes_by_agent.values():
            self._ticket_ids |= {_ticket_id(note) for note in notes if note.startswith(_PREFIX)}
        return {
            agent: [note for note in notes if not note.startswith(_PREFIX)] for agent, notes in notes_by_agent.items()
        }

    def take(self) -> ReadTickets | None:
        """Return the tickets of all notes since the last call; None where there were none."""
        taken, self._ticket_ids = self._ticket_ids, set()
        return ReadTickets(frozenset(taken)) if taken else None


def _ticket_id(note: bytes) -> str:
    return note.rpartition(b":")[0].decode(errors="replace")
