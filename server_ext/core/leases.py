"""The lease table: which KV blocks each session holds on this engine, until when, and what a turn may do.

The life of a turn, in call order: `begin` (match the prompt, check out a ticket) · `finish` (the scheduler
pins the request's blocks provisionally) · `settle` (the pin becomes the lease and supersedes the old one), or
`abandon` (the old lease stays) · `return_ticket`. Owners call `extend`, `release`, `fork`, `rewind` and
`forget`; the engine calls `revoke` and `release_all`. Every verb sweeps first what is due, so there is no timer.

Leases are soft: nothing is correct because of one. May import the standard library, `bidikv_sdk.{wire,
prefix}` and its neighbours.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from bidikv_sdk.prefix import common_prefix_length, num_blocks
from bidikv_sdk.wire import LeaseInfo, PoolInfo

from . import snapshot
from .errors import LeaseLost, turn_is_not_open, turn_is_running
from .holdings import Holdings
from .policy import RevocationOrder, least_remaining_first
from .records import Begun, Key, Lease, Slot, Ticket, Turn
from .revocation import Revoker
from .ticket_desk import TicketDesk

if TYPE_CHECKING:
    from bidikv_sdk.wire import Reason

    from .metrics import Counts, Snapshot
    from .ports import BlockPins
    from .settings import HomeSettings

WantsTicket: TypeAlias = Callable[[int, int | None], bool]
"""Says whether a reader is to read, from the number of matching tokens and the index of the first other one."""


class LeaseTable:
    """All leases, provisional pins and tickets of one engine, owned by the scheduler's thread.

    Args:
        pins: the engine's block pool.
        settings: budgets and times.
        block_size: tokens per block.
        max_request_blocks: blocks of the longest request; tickets never leave fewer than these to requests.
        new_ticket_id: mints an id that nobody can guess.
        order: which lease gives way first.
    """

    def __init__(
        self,
        pins: "BlockPins",
        settings: "HomeSettings",
        *,
        block_size: int,
        max_request_blocks: int,
        new_ticket_id: Callable[[], str],
        order: RevocationOrder = least_remaining_first,
    ) -> None:
        self._pins = pins
        self._settings = settings
        self._block_size = block_size
        self._held = Holdings(pins, settings, block_size=block_size)
        self._revoker = Revoker(self._held, pins, order)
        self._desk = TicketDesk(
            self._held,
            settings,
            block_size=block_size,
            max_ticketed=pins.num_total_blocks() - max_request_blocks,
            new_ticket_id=new_ticket_id,
        )

    # ---------------------------------------------------------------- a turn

    def begin(
        self,
        key: Key,
        prompt_ids: "Sequence[int] | array[int]",
        fingerprint: str,
        *,
        now_s: float,
        want_ticket: "bool | WantsTicket",
        nonce: str,
    ) -> Begun:
        """Begin a turn: renew the session's lease for it, and open a ticket on what matches the prompt.

        The lease does not expire while its turn is open, but may be revoked. What is left of one that expired or was
        revoked is pinned again for a reader. An unknown key is a session without a lease.

        Args:
            key: the session.
            prompt_ids: [num_tokens], the whole prompt.
            fingerprint: of the model, weights, adapter and salt that the turn runs with.
            now_s: monotonic seconds.
            want_ticket: whether a reader is to read the matching blocks; or what says so once it is known how many.
            nonce: the turn's name, new and unguessable.

        Raises:
            TurnConflict: a turn of the session is open; nothing changed.
        """
        held = self._held
        held.sweep(now_s=now_s)
        slot = held.slots.get(key) or Slot()
        if slot.turn is not None:
            raise turn_is_running(key[1])
        turn = Turn(due_s=now_s + self._settings.turn_timeout_s, key=key, nonce=nonce, fingerprint=fingerprint)
        held.open_turn(turn, slot)
        held.renew(key, None, now_s=now_s)
        lease = held.leases.get(key)
        if lease is None and want_ticket:
            lease = self._held.regain(key, fingerprint, now_s=now_s)
        if lease is None:
            return Begun(0, 0, None, slot.reason or "first_turn", None, None)
        if lease.fingerprint != fingerprint:
            return Begun(lease.num_tokens, 0, None, "model_changed", None, None)
        num_matched = min(common_prefix_length(lease.token_ids, prompt_ids), lease.num_tokens)
        diverged_at = num_matched if num_matched < min(lease.num_tokens, len(prompt_ids)) else None
        ticket, ticket_reason = None, None
        if num_matched and (want_ticket(num_matched, diverged_at) if callable(want_ticket) else want_ticket):
            ticket, ticket_reason = self._desk.check_out(turn, lease, num_matched, now_s=now_s)
        return Begun(lease.num_tokens, num_matched, diverged_at, slot.reason, ticket, ticket_reason)

    def finish(
        self, nonce: str, block_ids: Sequence[int], num_tokens: int, token_ids: Sequence[int], *, now_s: float
    ) -> bool:
        """Pin the blocks of a turn's finished request provisionally; return whether this call pinned them.

        Nothing is pinned for an unknown nonce, for a turn that has a pin already or began under other weights, or
        without computed tokens (a request that lost its blocks): then the old lease stays.

        Args:
            nonce: of `begin`.
            block_ids: [>= blocks of num_tokens], while the request still holds them.
            num_tokens: tokens whose KV is certainly computed, in-flight ones excluded.
            token_ids: [>= num_tokens], prompt and generated ids.
            now_s: monotonic seconds.
        """
        self._held.sweep(now_s=now_s)
        turn = self._held.turns.get(nonce)
        num_tokens = min(num_tokens, len(token_ids), len(block_ids) * self._block_size)
        if turn is None or turn.pin is not None or turn.has_old_weights or num_tokens <= 0:
            return False
        pin = Lease(
            due_s=now_s + self._settings.provisional_ttl_s,
            key=turn.key,
            block_ids=array("i", block_ids[: num_blocks(num_tokens, self._block_size)]),
            num_tokens=num_tokens,
            token_ids=array("i", token_ids[:num_tokens]),
            fingerprint=turn.fingerprint,
            ttl_s=self._settings.default_ttl_s,
            is_provisional=True,
        )
        self._held.put_pin(turn, pin)
        return True

    def settle(
        self,
        nonce: str,
        num_tokens_kept: int,
        *,
        ttl_s: float | None,
        now_s: float,
        token_ids: "array[int] | None" = None,
    ) -> LeaseInfo:
        """End a turn: its pin, clipped to what the answer kept, becomes the lease and supersedes the old one.

        Without a pin (gone, or never made), or where nothing is kept, the previous lease stays and is
        renewed. Over the budget of the pool or of the tenant the new lease is shorter, or none, with that
        reason.

        Args:
            nonce: of `begin`.
            num_tokens_kept: tokens of the prompt and the answer that the session keeps.
            ttl_s: life of the lease in seconds, at most `max_ttl_s`; None for the default.
            now_s: monotonic seconds.
            token_ids: the session's own copy of the ids; shared where equal, to keep them in memory once.

        Raises:
            InvalidRequest: `ttl_s` is not a number above 0; nothing changed.
            TurnConflict: no such turn is open.
        """
        ttl_s = self._settings.checked_ttl_s(ttl_s)
        self._held.sweep(now_s=now_s)
        turn = self._held.turns.get(nonce)
        if turn is None:
            raise turn_is_not_open(nonce)
        if turn.pin is not None and num_tokens_kept > 0:
            self._held.grant(turn, num_tokens_kept, ttl_s, token_ids, now_s=now_s)
        else:
            if turn.pin is None:
                self._explain_lost_pin(turn)
            self._held.renew(turn.key, ttl_s, now_s=now_s)
        self._held.close_turn(turn)
        return self._info(turn.key, now_s=now_s)

    def _explain_lost_pin(self, turn: Turn) -> None:
        slot = self._held.slots[turn.key]
        # A request that never had a pin lost its blocks before it ended, which only memory pressure does.
        slot.reason = turn.pin_reason or "lease_revoked"
        if turn.key not in self._held.leases:
            slot.state = "expired" if slot.reason == "lease_expired" else "revoked"

    def abandon(self, nonce: str, *, return_ticket: bool, now_s: float) -> bool:
        """End a turn that failed or whose client left: its pin is dropped; the old lease stays, renewed.

        Returns whether the turn was open; an unknown nonce changes nothing.

        Args:
            nonce: of `begin`.
            return_ticket: whether no reader can still be reading; else the ticket stays until its deadline.
            now_s: monotonic seconds.
        """
        self._held.sweep(now_s=now_s)
        turn = self._held.turns.get(nonce)
        if turn is None:
            return False
        self._held.close_turn(turn)
        self._held.renew(turn.key, None, now_s=now_s)
        if return_ticket and turn.ticket_id is not None:
            self.return_ticket(turn.ticket_id, now_s=now_s)
        return True

    def return_ticket(self, ticket_id: str, *, now_s: float, read_age_s: float | None = None) -> bool:
        """End a ticket whose reader is done; return whether it was open (idempotent).

        Args:
            ticket_id: of `begin`.
            now_s: monotonic seconds.
            read_age_s: how long ago the reader ended a read that it used, at least; None where it used none. One
                that ended when the blocks could have been given away is counted as stale.
        """
        self._held.sweep(now_s=now_s)
        return self._desk.take_back(ticket_id, now_s=now_s, read_age_s=read_age_s)

    def is_open(self, nonce: str) -> bool:
        """Return whether a turn has begun and neither ended nor been swept."""
        return nonce in self._held.turns

    # ---------------------------------------------------------------- the owner

    def extend(self, key: Key, ttl_s: float | None, *, now_s: float) -> LeaseInfo:
        """Keep a lease for at least `ttl_s` more seconds (cut to `max_ttl_s`; None: the default).

        Never shortens: where the lease has longer to live already, nothing changes.

        Raises:
            InvalidRequest: `ttl_s` is not a number above 0.
            LeaseLost: the session holds no lease (also for an unknown key); the reason says why.
        """
        ttl_s = self._settings.checked_ttl_s(ttl_s)
        self._held.sweep(now_s=now_s)
        if key not in self._held.leases:
            reason = self._held.slots.get(key, Slot()).reason or "first_turn"
            msg = f"session {key[1]!r} holds no lease ({reason}): its next turn makes a new one"
            raise LeaseLost(msg, reason=reason)
        self._held.renew(key, ttl_s, now_s=now_s)
        return self._info(key, now_s=now_s)

    def release(self, key: Key, *, now_s: float) -> LeaseInfo:
        """Give a session's lease back; idempotent, and without effect where there never was one.

        A turn that is running goes on, and its end makes a new lease: release speaks of what is held now. To
        keep nothing after a running turn, release when it has ended. Open tickets stay open.
        """
        self._held.sweep(now_s=now_s)
        slot = self._held.slots.get(key)
        if key in self._held.leases:
            self._held.end_lease(key, "released", "released")
        elif slot is not None and slot.state != "none":
            # Also what is gone already: the engine must not take up again what its owner gave back.
            slot.state, slot.reason = "released", "released"
            self._held.lost.forget(key)
        return self._info(key, now_s=now_s)

    def fork(
        self, key: Key, child_key: Key, token_ids: "array[int]", *, ttl_s: float | None, now_s: float
    ) -> LeaseInfo:
        """Let a new session of the same tenant hold what another one's lease and its own history have in common.

        Each holds references of its own: ending one lease never hurts the other. Without a lease the child says why
        as its parent does.

        Args:
            key: the parent.
            child_key: the child, unknown so far.
            token_ids: [num_tokens], the child's history; empty where it is not known, and then all is shared.
            ttl_s: life of the child's lease in seconds, at most `max_ttl_s`; None for that of the parent's.
            now_s: monotonic seconds.
        """
        self._held.sweep(now_s=now_s)
        slot, lease = self._held.slots.get(key), self._held.leases.get(key)
        if slot is not None:
            num_tokens = _num_common(lease, token_ids)
            child = self._held.slots[child_key] = Slot(state=slot.state, reason=slot.reason)
            if lease is not None:
                child.state = "active" if num_tokens else "none"
                child.reason = slot.reason if num_tokens == lease.num_tokens else None
            if lease is not None and num_tokens:
                self._held.share(lease, child_key, num_tokens, ttl_s, now_s=now_s)
        return self._info(child_key, now_s=now_s)

    def rewind(self, key: Key, token_ids: "array[int]", *, now_s: float) -> LeaseInfo:
        """Give back what a lease holds behind the part that it has in common with its session's new history.

        Where nothing is in common, or the history is not known (empty), the lease stays as it is: the next turn uses
        as much of it as matches.
        """
        self._held.sweep(now_s=now_s)
        lease = self._held.leases.get(key)
        num_tokens = _num_common(lease, token_ids)
        if lease is not None and 0 < num_tokens < lease.num_tokens:
            self._held.trim(lease, num_tokens)
        return self._info(key, now_s=now_s)

    def forget(self, key: Key, *, now_s: float) -> None:
        """Drop all that is known of a session: its lease, its open turn, its reason. Tickets stay open."""
        self._held.sweep(now_s=now_s)
        slot = self._held.slots.get(key)
        if slot is not None and slot.turn is not None:
            self._held.close_turn(slot.turn)
        if key in self._held.leases:
            self._held.end_lease(key, "released", "released")
        self._held.lost.forget(key)
        self._held.slots.pop(key, None)

    # ---------------------------------------------------------------- the engine

    def sweep(self, *, now_s: float) -> int:
        """End all that is due (turns, pins, tickets, leases); return how many. Cheap when nothing is."""
        return self._held.sweep(now_s=now_s)

    def catch_up(self, *, now_s: float) -> None:
        """Sweep at each moment up to now at which something was due: where nobody did, so that times count exactly."""
        self._held.catch_up(now_s=now_s)

    def num_reclaimable(self, *, now_s: float, limit: int | None = None) -> int:
        """Return how many blocks revoking could free, as `Revoker.num_reclaimable`."""
        return self._revoker.num_reclaimable(now_s=now_s, limit=limit)

    def revoke(self, num_blocks: int, *, now_s: float, all_or_nothing: bool = False) -> int:
        """Free blocks for requests, as `Revoker.revoke`; return how many became free."""
        return self._revoker.revoke(num_blocks, now_s=now_s, all_or_nothing=all_or_nothing)

    def release_all(self, reason: "Reason", *, now_s: float) -> None:
        """Drop every lease and pin, whatever tickets are open, as `Revoker.release_all`."""
        self._revoker.release_all(reason, now_s=now_s)

    def has_tickets(self, *, now_s: float) -> bool:
        """Return whether a ticket is open: a reader may be reading, and no cache reset can free its blocks."""
        self._held.sweep(now_s=now_s)
        return bool(self._held.tickets)

    # ---------------------------------------------------------------- questions

    def info(self, key: Key, *, now_s: float) -> LeaseInfo:
        """Return the state of a session's lease; `none` for an unknown key."""
        self._held.sweep(now_s=now_s)
        return self._info(key, now_s=now_s)

    def pool(self, *, now_s: float) -> PoolInfo:
        """Return the state of the block pool."""
        self._held.sweep(now_s=now_s)
        num_ticketed = self._held.ledger.num_ticketed_blocks
        return PoolInfo(self._pins.num_free_blocks(), self._pins.num_total_blocks(), num_ticketed)

    def holdings(self) -> Iterator[Lease | Ticket]:
        """Iterate everything that holds references: leases, provisional pins, open tickets. Change none."""
        yield from self._held.revocable()
        yield from self._held.tickets.values()

    @property
    def num_leased_blocks(self) -> int:
        """Distinct blocks that leases hold; provisional pins and tickets are not counted."""
        return self._held.ledger.num_leased_blocks

    @property
    def counts(self) -> "Counts":
        """Events since the start."""
        return self._held.counts

    def snapshot(self, *, now_s: float, block_bytes: int) -> "Snapshot":
        """Return the metrics of leases, tickets and blocks, true at this moment.

        Args:
            now_s: monotonic seconds.
            block_bytes: memory of one block.
        """
        self._held.sweep(now_s=now_s)
        return snapshot.of_leases(self._held, self._pins, block_bytes=block_bytes)

    def _info(self, key: Key, *, now_s: float) -> LeaseInfo:
        slot, lease = self._held.slots.get(key) or Slot(), self._held.leases.get(key)
        if lease is None:
            return LeaseInfo(slot.state, 0.0, 0, 0, slot.reason)
        due_s = lease.due_s if slot.turn is None else max(lease.due_s, slot.turn.due_s)
        return LeaseInfo("active", due_s - now_s, lease.num_tokens, len(lease.block_ids), slot.reason)


def _num_common(lease: Lease | None, token_ids: "array[int]") -> int:
    """Return how many tokens a lease and a history have in common: all of the lease where the history is empty."""
    if lease is None or not token_ids:
        return 0 if lease is None else lease.num_tokens
    return min(common_prefix_length(lease.token_ids, token_ids), lease.num_tokens)
