"""What is held right now, and the steps between two states of it: the lease table's memory.

Keeps one invariant: the references that the ledger counts are those of the live leases, the pins of open
turns and the open tickets. Each step changes records, references and deadlines together; `leases` decides
which step to take, and only it calls this module.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from bidikv_sdk.prefix import common_prefix_length, num_blocks

from . import metrics
from .deadlines import Deadlines
from .journal import log_transition
from .ledger import BlockLedger
from .lost import LostLeases
from .records import Key, Lease, Slot, Ticket, Turn

if TYPE_CHECKING:
    from bidikv_sdk.wire import LeaseState, Reason

    from .journal import Transition
    from .ports import BlockPins
    from .settings import HomeSettings

# Only readers that are very late are compared with these.
_MAX_EXPIRED_TICKETS: Final = 1000


class Holdings:
    """Leases, provisional pins, tickets and open turns of one engine, by key, nonce and ticket id."""

    def __init__(self, pins: "BlockPins", settings: "HomeSettings", *, block_size: int) -> None:
        self._max_leased = int(pins.num_total_blocks() * settings.budget_fraction)
        self._max_tenant_leased = int(self._max_leased * settings.tenant_share)
        self.ledger = BlockLedger(pins, counts_tenants=self._max_tenant_leased < self._max_leased)
        self.lost = LostLeases(pins, block_size=block_size)
        self.slots: dict[Key, Slot] = {}
        self.leases: dict[Key, Lease] = {}
        self.turns: dict[str, Turn] = {}
        self.tickets: dict[str, Ticket] = {}
        self.counts = metrics.Counts()
        self.expired_tickets: OrderedDict[str, float] = OrderedDict()
        """When the blocks of the last tickets that were not returned in time were given back."""
        self._deadlines: Deadlines[Lease | Ticket | Turn] = Deadlines()
        self._block_size = block_size
        self._num_provisional = 0
        self._block_seconds = metrics.BlockSeconds()
        self._swept_s: float | None = None

    def pins_of_turns(self) -> Iterator[Lease]:
        """Iterate the provisional leases."""
        return (turn.pin for turn in self.turns.values() if turn.pin is not None)

    def revocable(self) -> Iterator[Lease]:
        """Iterate what gives way to requests: leases and provisional ones."""
        yield from self.leases.values()
        yield from self.pins_of_turns()

    def num_blocks_by_holder(self) -> dict[str, int]:
        """Return how many blocks leases, provisional pins and tickets hold; each counts for itself."""
        return {
            "lease": self.ledger.num_leased_blocks,
            "provisional": self._num_provisional,
            "ticket": self.ledger.num_ticketed_blocks,
        }

    def block_seconds_by_holder(self) -> dict[str, float]:
        """Return the blocks that each held, times how long, up to the last sweep."""
        return self._block_seconds.totals

    # ---------------------------------------------------------------- turns and their pins

    def open_turn(self, turn: Turn, slot: Slot) -> None:
        """Enter a turn of a session that has none open, and has this slot; its lease stops expiring."""
        self.slots[turn.key] = slot
        slot.turn = self.turns[turn.nonce] = turn
        self._deadlines.schedule(turn)

    def close_turn(self, turn: Turn) -> None:
        """Remove an open turn and its pin; the session's lease, if any, expires again."""
        if turn.pin is not None:
            self.drop_pin(turn, None)
        self._deadlines.drop(turn)
        del self.turns[turn.nonce]
        self.slots[turn.key].turn = None
        lease = self.leases.get(turn.key)
        if lease is not None and not lease.is_scheduled:
            self._deadlines.schedule(lease)

    def put_pin(self, turn: Turn, pin: Lease) -> None:
        """Pin the blocks of a turn that has no pin."""
        self.ledger.pin(pin.block_ids)
        self._num_provisional += len(pin.block_ids)
        self._deadlines.schedule(pin)
        turn.pin, turn.pin_reason = pin, None

    def drop_pin(self, turn: Turn, reason: "Reason | None") -> None:
        """Give the pin of a turn back, if it has one."""
        if turn.pin is not None:
            self._deadlines.drop(turn.pin)
            self.ledger.unpin(turn.pin.block_ids)
            self._num_provisional -= len(turn.pin.block_ids)
            log_transition("drop pin", turn.key, num_blocks=len(turn.pin.block_ids), reason=reason)
            turn.pin, turn.pin_reason = None, reason
            self.counts.add(metrics.DROPPED_PINS, reason or "abandoned")

    # ---------------------------------------------------------------- leases

    def grant(self, turn: Turn, num_tokens: int, ttl_s: float, token_ids: "array[int] | None", *, now_s: float) -> None:
        """Make the first `num_tokens` (> 0) of a turn's pin the session's lease, within the budgets.

        The old lease is superseded: its references are given back when the new ones exist.
        """
        self.lost.forget(turn.key)
        pin, turn.pin = turn.pin, None
        assert pin is not None  # noqa: S101 (the caller's promise)
        self._deadlines.drop(pin)
        self._num_provisional -= len(pin.block_ids)
        num_tokens = min(num_tokens, pin.num_tokens)
        wanted_ids = pin.block_ids[: num_blocks(num_tokens, self._block_size)]
        granted_ids = self._supersede(pin.key, wanted_ids)
        self.ledger.unpin(pin.block_ids[len(granted_ids) :])

        slot = self.slots[pin.key]
        slot.state, slot.reason = "none", turn.pin_reason
        if len(granted_ids) < len(wanted_ids):
            slot.reason = "over_budget"
            self.counts.add(metrics.CLIPS if granted_ids else metrics.REJECTIONS, "over_budget")
            log_transition(
                "clip" if granted_ids else "reject", pin.key, num_blocks=len(granted_ids), reason="over_budget"
            )
        if granted_ids:
            num_tokens = min(num_tokens, len(granted_ids) * self._block_size)
            held_ids = _first(pin.token_ids, num_tokens)
            if token_ids is not None and _first(token_ids, num_tokens) == held_ids:
                held_ids = token_ids
            lease = Lease(
                due_s=now_s + ttl_s,
                key=pin.key,
                block_ids=granted_ids,
                num_tokens=num_tokens,
                token_ids=held_ids,
                fingerprint=pin.fingerprint,
                ttl_s=ttl_s,
            )
            self._enter(lease)
            self.counts.add(metrics.GRANTS)
            log_transition("grant", pin.key, num_blocks=len(granted_ids), reason=slot.reason)

    def _supersede(self, key: Key, wanted_ids: "array[int]") -> "array[int]":
        """Charge pinned blocks in place of the session's lease; return those that the budgets allow."""
        tenant = key[0]
        old = self.leases.pop(key, None)
        old_ids = old.block_ids if old is not None else array("i")
        # What old and new share changes no count: after a long history only the new blocks cost anything.
        num_shared = common_prefix_length(old_ids, wanted_ids)
        self.ledger.credit(tenant, old_ids[num_shared:])
        num_granted = num_shared + self._num_affordable(tenant, wanted_ids[num_shared:])
        self.ledger.charge(tenant, wanted_ids[num_shared:num_granted])
        if old is not None:
            self._deadlines.drop(old)
            self.ledger.unpin(old_ids)
            self.counts.add(metrics.SUPERSEDES)
            log_transition("supersede", key, num_blocks=len(old_ids))
        return wanted_ids[:num_granted]

    def _num_affordable(self, tenant: str, block_ids: "array[int]") -> int:
        return self.ledger.num_affordable(
            tenant, block_ids, max_leased=self._max_leased, max_tenant_leased=self._max_tenant_leased
        )

    def share(self, lease: Lease, key: Key, num_tokens: int, ttl_s: float | None, *, now_s: float) -> None:
        """Give a session that holds nothing a lease on the first `num_tokens` (> 0) of another's.

        Within the budgets by itself, for both are of one tenant: a block that is leased already costs nothing more.
        """
        shared_ids = lease.block_ids[: num_blocks(num_tokens, self._block_size)]
        self.ledger.pin(shared_ids)
        self.ledger.charge(key[0], shared_ids)
        ttl_s = lease.ttl_s if ttl_s is None else ttl_s
        child = Lease(
            due_s=now_s + ttl_s,
            key=key,
            block_ids=shared_ids,
            num_tokens=num_tokens,
            token_ids=lease.token_ids,
            fingerprint=lease.fingerprint,
            ttl_s=ttl_s,
        )
        self._enter(child)
        self.counts.add(metrics.FORKS)
        log_transition("fork", key, num_blocks=len(shared_ids))

    def regain(self, key: Key, fingerprint: str, *, now_s: float) -> Lease | None:
        """Pin again what a lost lease has left, within the budgets; return the lease, None where nothing is left.

        The session's reason stays: it tells why the lease was gone.
        """
        found = self.lost.find(key)
        if found is None or found[0].fingerprint != fingerprint:
            return None
        lost, intact_ids = found
        num_blocks = self._num_affordable(key[0], intact_ids)
        if not num_blocks:
            return None
        self.lost.forget(key)
        regained_ids = intact_ids[:num_blocks]
        self.ledger.pin(regained_ids)
        self.ledger.charge(key[0], regained_ids)
        lease = Lease(
            due_s=now_s + lost.ttl_s,
            key=key,
            block_ids=regained_ids,
            num_tokens=num_blocks * self._block_size,
            token_ids=lost.token_ids,
            fingerprint=fingerprint,
            ttl_s=lost.ttl_s,
        )
        self._enter(lease)
        self.counts.add(metrics.REGAINS)
        log_transition("regain", key, num_blocks=num_blocks, reason=self.slots[key].reason)
        return lease

    def _enter(self, lease: Lease) -> None:
        self.leases[lease.key] = lease
        self.slots[lease.key].state = "active"
        self._deadlines.schedule(lease)

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Give back what a lease holds behind its first `num_tokens` (> 0), for its owner went back there."""
        num_kept = num_blocks(num_tokens, self._block_size)
        trimmed_ids = lease.block_ids[num_kept:]
        self.ledger.credit(lease.key[0], trimmed_ids)
        self.ledger.unpin(trimmed_ids)
        del lease.block_ids[num_kept:]
        lease.num_tokens = num_tokens
        self.slots[lease.key].reason = None
        log_transition("rewind", lease.key, num_blocks=num_kept)

    def renew(self, key: Key, ttl_s: float | None, *, now_s: float) -> None:
        """Let a session's lease, if any, live at least `ttl_s` (None: its own ttl) from now."""
        lease = self.leases.get(key)
        if lease is not None:
            lease.due_s = max(lease.due_s, now_s + (lease.ttl_s if ttl_s is None else ttl_s))
            self.counts.add(metrics.RENEWALS)
            log_transition("renew", key, num_blocks=len(lease.block_ids))

    def end_lease(self, key: Key, state: "LeaseState", reason: "Reason") -> None:
        """Give a live lease back."""
        lease, slot = self.leases.pop(key), self.slots[key]
        if reason in {"lease_expired", "lease_revoked"}:
            self.lost.remember(lease)
        self._deadlines.drop(lease)
        self.ledger.credit(key[0], lease.block_ids)
        self.ledger.unpin(lease.block_ids)
        slot.state, slot.reason = state, reason
        if state == "revoked":
            self.counts.add(metrics.REVOCATIONS, reason)
            transition: Transition = "revoke" if reason == "lease_revoked" else "reset"
        elif state == "expired":
            self.counts.add(metrics.EXPIRIES)
            transition = "expire"
        else:
            self.counts.add(metrics.RELEASES)
            transition = "release"
        log_transition(transition, key, num_blocks=len(lease.block_ids), reason=reason)

    def clip(self, lease: Lease, num_kept: int) -> None:
        """Take the blocks behind the first `num_kept` from a lease or a pin, under memory pressure."""
        slot = self.slots[lease.key]
        clipped_ids = lease.block_ids[num_kept:]
        self.counts.add(metrics.REVOKED_BLOCKS, amount=len(clipped_ids))
        if lease.is_provisional:
            assert slot.turn is not None  # noqa: S101 (a pin ends with its turn)
            slot.turn.pin_reason = "lease_revoked"
            if num_kept == 0:
                self.drop_pin(slot.turn, "lease_revoked")
                return
            self._num_provisional -= len(clipped_ids)
            log_transition("clip pin", lease.key, num_blocks=num_kept, reason="lease_revoked")
        elif num_kept == 0:
            self.end_lease(lease.key, "revoked", "lease_revoked")
            return
        else:
            slot.reason = "lease_revoked"
            self.ledger.credit(lease.key[0], clipped_ids)
            self.counts.add(metrics.CLIPS, "lease_revoked")
            log_transition("clip", lease.key, num_blocks=num_kept, reason="lease_revoked")
        self.ledger.unpin(clipped_ids)
        del lease.block_ids[num_kept:]
        lease.num_tokens = min(lease.num_tokens, num_kept * self._block_size)

    # ---------------------------------------------------------------- tickets

    def open_ticket(self, turn: Turn, ticket: Ticket) -> None:
        """Take a ticket's references for the reader of a turn."""
        self.ledger.open_ticket(ticket.block_ids)
        self._deadlines.schedule(ticket)
        self.tickets[ticket.ticket_id] = ticket
        turn.ticket_id = ticket.ticket_id
        self.counts.add(metrics.TICKETS, "opened")

    def end_ticket(self, ticket: Ticket, event: Literal["returned", "expired"]) -> None:
        """Give an open ticket's references back."""
        del self.tickets[ticket.ticket_id]
        self._deadlines.drop(ticket)
        self.ledger.close_ticket(ticket.block_ids)
        self.counts.add(metrics.TICKETS, event)

    # ---------------------------------------------------------------- time

    def catch_up(self, *, now_s: float) -> None:
        """End what is due, each at the very moment at which it was."""
        while (due_s := self._deadlines.next_s()) <= now_s:
            self.sweep(now_s=due_s)

    def sweep(self, *, now_s: float) -> int:
        """End everything that is due, wherever it stands; return how many ended.

        Also what tells the clock: nothing changes at a time that it was not told.
        """
        if now_s != self._swept_s:
            self._block_seconds.advance(self.num_blocks_by_holder(), now_s=now_s)
            self._swept_s = now_s
        num_ended = 0
        while (item := self._deadlines.pop_due(now_s=now_s)) is not None:
            num_ended += self._expire(item)
        return num_ended

    def _expire(self, item: Lease | Ticket | Turn) -> bool:
        if isinstance(item, Ticket):
            self.end_ticket(item, "expired")
            self.expired_tickets[item.ticket_id] = item.due_s
            if len(self.expired_tickets) > _MAX_EXPIRED_TICKETS:
                self.expired_tickets.popitem(last=False)
        elif isinstance(item, Turn):
            self.close_turn(item)
            self.counts.add(metrics.TURN_TIMEOUTS)
        elif (turn := self.slots[item.key].turn) is None:
            self.end_lease(item.key, "expired", "lease_expired")
        elif item.is_provisional:
            self.drop_pin(turn, "lease_expired")
        else:
            return False  # closing its turn schedules it again
        return True


def _first(token_ids: "array[int]", num_tokens: int) -> "array[int]":
    """Return the first tokens; where those are all there are, which they mostly are, without a copy."""
    return token_ids if len(token_ids) == num_tokens else token_ids[:num_tokens]
