"""Opens tickets on leases and takes them back: what a reader may hold, and what its return tells.

A ticket's references are its own: nothing but its return or its deadline ends them. There are three ways back (the
conductor, when P has answered; P's own notification; the deadline), in any order and as often as they like. Only
`leases` calls this; `tickets` is how a ticket looks on the wire.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from bidikv_sdk.prefix import num_blocks

from .metrics import STALE_READS, TICKET_REFUSALS
from .records import Lease, Ticket, Turn

if TYPE_CHECKING:
    from bidikv_sdk.wire import Reason

    from .holdings import Holdings
    from .settings import HomeSettings


class TicketDesk:
    """The tickets of one lease table.

    Args:
        held: what the table holds.
        settings: times, and the fewest tokens that are worth a ticket.
        block_size: tokens per block.
        max_ticketed: most blocks that all tickets together may hold.
        new_ticket_id: mints an id that nobody can guess.
    """

    def __init__(
        self,
        held: "Holdings",
        settings: "HomeSettings",
        *,
        block_size: int,
        max_ticketed: int,
        new_ticket_id: Callable[[], str],
    ) -> None:
        self._held = held
        self._settings = settings
        self._block_size = block_size
        self._max_ticketed = max_ticketed
        self._new_ticket_id = new_ticket_id

    def check_out(
        self, turn: Turn, lease: Lease, num_tokens: int, *, now_s: float
    ) -> "tuple[Ticket | None, Reason | None]":
        """Open a ticket on the first `num_tokens` (> 0) of a lease for the reader of a turn; or return why not."""
        block_ids = lease.block_ids[: num_blocks(num_tokens, self._block_size)]
        reason: Reason | None = None
        if num_tokens < self._settings.min_fetch_tokens:
            reason = "below_threshold"
        elif not self._held.ledger.can_ticket(block_ids, max_ticketed=self._max_ticketed):
            # Tickets cannot be revoked: all of them together must leave room for the longest request.
            reason = "over_budget"
        if reason is not None:
            self._held.counts.add(TICKET_REFUSALS, reason)
            return None, reason
        deadline_s = now_s + self._settings.ticket_ttl_s
        ticket = Ticket(
            due_s=deadline_s + self._settings.ticket_grace_s,
            ticket_id=self._new_ticket_id(),
            block_ids=block_ids,
            num_tokens=num_tokens,
            deadline_s=deadline_s,
        )
        self._held.open_ticket(turn, ticket)
        return ticket, None

    def take_back(self, ticket_id: str, *, now_s: float, read_age_s: float | None) -> bool:
        """End a ticket whose reader is done; return whether it was open. See `LeaseTable.return_ticket`."""
        ticket = self._held.tickets.get(ticket_id)
        if ticket is not None:
            self._held.end_ticket(ticket, "returned")
            return True
        if read_age_s is not None:
            given_back_s = self._held.expired_tickets.pop(ticket_id, math.inf)
            if now_s - read_age_s >= given_back_s:
                self._held.counts.add(STALE_READS)
        return False
