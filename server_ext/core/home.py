"""The home of sessions on one engine: what API processes and the scheduler may ask of its two tables.

API processes call `handle(op, arg)` with plain dicts. A turn: `load` (render from this; who settled the turn before may
know it) · `begin` (nonce, ticket) · the request runs under the nonce, and the scheduler calls `finish` when it ends ·
`settle`, or `abandon`; and `return_ticket` when the reader has answered. The scheduler calls `sweep`,
`return_ticket`, and, of `leases`, `finish`, `is_open`, `revoke`, `has_tickets` and `release_all` directly.

Every operation's result has `info`, the `bidikv` object of the wire (`cache` null), unless said otherwise; or
only `error`, the error object of the wire, with nothing changed. Pure; may import the standard library,
`bidikv_sdk.{wire, prefix}` and its neighbours. Long, because all operations stand in one place.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bidikv_sdk.wire import SessionInfo

from . import snapshot
from .errors import HomeError, InvalidRequest, session_is_unknown
from .gaps import GapModel
from .leases import LeaseTable
from .ops import read_arg
from .policy import LeastValueFirst, RevocationOrder, least_remaining_first
from .rates import LearnedRates, MarginalRates
from .routing import Routing, choice_info
from .session_record import page_of
from .sessions import SessionTable
from .tickets import TICKET_ID_PREFIX, build_ticket

if TYPE_CHECKING:
    from array import array

    from bidikv_sdk.wire import Reason, Route

    from .cost import Observed
    from .ports import BlockPins
    from .records import Begun, Key, Ticket
    from .session_record import Session
    from .settings import HomeSettings


class Home:
    """Sessions and leases of one engine. Not thread-safe: the scheduler's thread owns it.

    - `leases`: the lease table, for the scheduler.

    Args:
        pins: the engine's block pool.
        settings: limits and times.
        block_size: tokens per block.
        max_request_blocks: blocks of the longest request.
        incarnation: random name of this process's life; sessions and leases end with it.
        secret: signs tickets; shared with the readers.
        make_address: the transport's fields of a ticket (see `tickets.build_ticket`), from its deadline.
        new_nonce: mints a random name that nobody can guess.
        block_bytes: memory of one block, for the metrics; 0 where nobody asks.
        rates: what computing and fetching take, as far as it is known at the start; turns teach it.
        count_running: how many requests generate on this engine at this moment.
    """

    def __init__(  # noqa: PLR0913 (what an engine is and provides)
        self,
        pins: "BlockPins",
        settings: "HomeSettings",
        *,
        block_size: int,
        max_request_blocks: int,
        incarnation: str,
        secret: bytes,
        make_address: Callable[[float], Mapping[str, Any]],
        new_nonce: Callable[[], str],
        block_bytes: int = 0,
        rates: LearnedRates | None = None,
        count_running: Callable[[], int] = lambda: 0,
    ) -> None:
        self.incarnation = incarnation
        self._settings = settings
        self._secret = secret
        self._make_address = make_address
        self._new_nonce = new_nonce
        self._block_bytes = block_bytes
        self._gaps = GapModel(max_sessions=settings.max_sessions)
        rates = rates if rates is not None else LearnedRates()
        self._routing = Routing(rates, settings, token_bytes=block_bytes / block_size, count_running=count_running)
        order: RevocationOrder = least_remaining_first
        if settings.revocation == "value":
            order = LeastValueFirst(self._gaps, MarginalRates(rates), pins.num_references, block_size=block_size)
        self.leases = LeaseTable(
            pins,
            settings,
            block_size=block_size,
            max_request_blocks=max_request_blocks,
            new_ticket_id=lambda: TICKET_ID_PREFIX + new_nonce(),
            order=order,
        )
        # 48 bits: any reader of JSON or msgpack can count on from there.
        first_revision = int(hashlib.sha256(incarnation.encode()).hexdigest()[:12], 16)
        self._sessions = SessionTable(settings, on_drop=self._forget, first_revision=first_revision)
        # Closed on purpose: what comes in names an operation, never an attribute.
        self._ops: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "load": self.load,
            "begin": self.begin,
            "settle": self.settle,
            "abandon": self.abandon,
            "return_ticket": self.return_ticket,
            "extend": self.extend,
            "release": self.release,
            "fork": self.fork,
            "rewind": self.rewind,
            "end": self.end,
            "get": self.get,
            "list": self.list_sessions,
            "metrics": self.metrics,
        }

    def handle(self, op: str, arg: Any, *, now_s: float) -> dict[str, Any]:
        """Run one operation; its argument's fields are those of `ops.OPS`."""
        try:
            fields = read_arg(op, arg)
            return self._ops[op](**fields, now_s=now_s)
        except HomeError as error:
            return {"error": error.to_json()}

    # ---------------------------------------------------------------- operations: a turn

    def open(
        self, *, tenant: str, session_id: str, chunk: bytes, turn: int, replace: bool, now_s: float
    ) -> dict[str, Any]:
        """Open a session, or return it as it is; with `replace` swap its transcript. Its lease stays."""
        key = (tenant, session_id)
        self._sessions.open(key, chunk, turn=turn, replace=replace, now_s=now_s)
        return {"info": self._info(key, now_s=now_s)}

    def load(
        self,
        *,
        tenant: str,
        session_id: str,
        turn: int | None,
        idempotency_key: str,
        now_s: float,
        parent_id: str | None = None,
    ) -> dict[str, Any]:
        """Return what the conductor of turn number `turn` (None: the next) renders from; refuse one that cannot begin.

        A first turn opens an unknown session; as a fork of `parent_id`, where that is known and does not run, if its
        number is not given. The result has `transcript` (the chunks), `token_ids` (packed int32, empty where not
        known), `id_counts` (how many of them the history had behind each chunk), `replaced` (chunks that an open has
        replaced since the last turn), `revision` (of the history), `incarnation`, and `reply` None. Where the turn is
        a repetition, it has only the stored `reply` beside `info`.
        """
        self.sweep(now_s=now_s)
        key = (tenant, session_id)
        if turn in {1, None} and self._sessions.get(key) is None:
            if turn is None and parent_id is not None:
                fork = {"tenant": tenant, "session_id": parent_id, "child_id": session_id}
                with suppress(HomeError):
                    self.fork(**fork, at_turn=None, ttl_s=None, now_s=now_s)
            if self._sessions.get(key) is None:
                self._sessions.open(key, b"", turn=0, replace=False, now_s=now_s)
        reply = self._sessions.check_turn(key, turn, idempotency_key, now_s=now_s)
        if reply is not None:
            return {"info": self._info(key, now_s=now_s), "reply": reply}
        session = self._sessions.require(key, now_s=now_s)
        return {
            "info": self._info(key, now_s=now_s),
            "reply": None,
            "transcript": list(session.transcript),
            "token_ids": session.token_ids.tobytes(),
            "id_counts": list(session.id_counts),
            "replaced": list(session.replaced),
            "revision": session.revision,
            "incarnation": self.incarnation,
        }

    def begin(  # noqa: PLR0913 (the fields of one operation)
        self,
        *,
        tenant: str,
        session_id: str,
        turn: int,
        idempotency_key: str,
        prompt_ids: "array[int]",
        fingerprint: str,
        route: "Route",
        now_s: float,
        prefill_urls: tuple[str, ...] = (),
        revision: int | None = None,
        num_kept: int | None = None,
    ) -> dict[str, Any]:
        """Begin a turn, all or nothing; one that ran too long is taken over.

        `route` is asked for, and `prefill_urls` are the Ps that may be asked, in order; none: all is computed here.
        `revision` is that of the history which the prompt was rendered from (`load`), and `num_kept` tells how many
        chunks of the transcript the turn continues (`SessionTable.start_turn`).

        The result has `nonce`, `route` (the way that the turn goes, never `auto`), `choice` (the wire's),
        `held_tokens`, `matched_tokens`, `diverged_at`, `lease_reason`, `ticket` (signed `kv_transfer_params`, or
        None), `ticket_id`, `ticket_reason` (why there is none although tokens matched), and `reply` None. Where the
        turn is a repetition, it has only the stored `reply` beside `info`.
        """
        key = (tenant, session_id)
        nonce, history = self._new_nonce(), {"revision": revision, "num_kept": num_kept}
        reply = self._sessions.start_turn(key, turn, idempotency_key, nonce, now_s=now_s, **history)
        if reply is not None:
            return {"info": self._info(key, now_s=now_s), "reply": reply}
        try:
            routed = self._routing.begin(nonce, key, route, len(prompt_ids), pairs=prefill_urls, now_s=now_s)
            begun = self.leases.begin(
                key, prompt_ids, fingerprint, now_s=now_s, want_ticket=routed.wants_ticket, nonce=nonce
            )
            choice = routed.settled(begun.ticket, begun.matched_tokens, begun.diverged_at)
            ticket = self._signed(begun.ticket, prompt_ids, fingerprint, nonce)
        except BaseException:
            self._routing.abandon(nonce)
            self.leases.abandon(nonce, return_ticket=True, now_s=now_s)
            self._sessions.cancel_turn(nonce, now_s=now_s)
            raise
        self._gaps.began(key, now_s=now_s)
        return {
            "info": self._info(key, now_s=now_s),
            "reply": None,
            "nonce": nonce,
            "route": choice.way,
            "choice": choice_info(choice),
            "held_tokens": begun.held_tokens,
            "matched_tokens": begun.matched_tokens,
            "diverged_at": begun.diverged_at,
            "lease_reason": self._lease_reason(key, begun),
            "ticket": ticket,
            "ticket_id": begun.ticket.ticket_id if begun.ticket is not None else None,
            "ticket_reason": begun.ticket_reason,
        }

    def settle(  # noqa: PLR0913 (the fields of one operation)
        self,
        *,
        nonce: str,
        num_tokens_kept: int,
        token_ids: "array[int]",
        chunk: bytes,
        reply: bytes,
        ttl_s: Any,
        ended_by: str = "stop",
        observed: "Observed | None" = None,
        report: bytes = b"",
        now_s: float,
    ) -> dict[str, Any]:
        """Append a finished turn to its session, and make what it pinned the session's lease.

        `token_ids` are all ids of the history with this turn, of which the answer kept `num_tokens_kept`;
        `chunk` is its part of the transcript, and `reply` what a repetition gets. `ended_by` is `tool:<name>` where
        the reply calls a tool, else a finish reason: it tells how soon the next turn may come. Ways are learned from
        `observed`, and `report` is what the turn's cache did, for `get` and `list`. The result has the history's new
        `revision` beside `info`.
        """
        ttl_s = self._settings.checked_ttl_s(ttl_s)
        # The record first: it cannot fail behind this line, and dropping others for it frees budget.
        session = self._sessions.complete_turn(nonce, token_ids, chunk, reply, now_s=now_s, report=report)
        self.leases.settle(nonce, num_tokens_kept, ttl_s=ttl_s, now_s=now_s, token_ids=token_ids)
        self._gaps.ended(session.key, ended_by, now_s=now_s)
        self._routing.settle(nonce, observed, now_s=now_s)
        return {"info": self._info(session.key, now_s=now_s), "revision": session.revision}

    def abandon(self, *, nonce: str, return_ticket: bool, now_s: float) -> dict[str, Any]:
        """End a turn without a trace; the result is `was_open` alone. Idempotent."""
        self.leases.abandon(nonce, return_ticket=return_ticket, now_s=now_s)
        self._routing.abandon(nonce)
        return {"was_open": self._sessions.cancel_turn(nonce, now_s=now_s)}

    def return_ticket(self, *, ticket_id: str, now_s: float, read_age_s: float | None = None) -> dict[str, Any]:
        """End a ticket whose reader is done; the result is `was_open` alone. Idempotent.

        `read_age_s` tells how long ago, at least, a read that was used had ended; None where none was used.
        """
        return {"was_open": self.leases.return_ticket(ticket_id, now_s=now_s, read_age_s=read_age_s)}

    # ---------------------------------------------------------------- operations: the owner

    def extend(self, *, tenant: str, session_id: str, ttl_s: Any, now_s: float) -> dict[str, Any]:
        """Keep the lease for at least `ttl_s` more seconds."""
        key = (tenant, session_id)
        self._sessions.require(key, now_s=now_s)
        self.leases.extend(key, ttl_s, now_s=now_s)
        return {"info": self._info(key, now_s=now_s)}

    def release(self, *, tenant: str, session_id: str, now_s: float) -> dict[str, Any]:
        """Give the lease back and keep the session (see `LeaseTable.release` for a turn that runs)."""
        key = (tenant, session_id)
        self._sessions.require(key, now_s=now_s)
        self.leases.release(key, now_s=now_s)
        return {"info": self._info(key, now_s=now_s)}

    def fork(
        self, *, tenant: str, session_id: str, child_id: str, at_turn: int | None, ttl_s: Any, now_s: float
    ) -> dict[str, Any]:
        """Make a child that has the session's history up to a turn, and shares its blocks; `info` is the child's.

        `ttl_s` None is that of the parent's lease. Idempotent: the same child is returned as it is.
        """
        if child_id == session_id:
            msg = f"child_id is {child_id!r}, the session itself: give the child another id"
            raise InvalidRequest(msg, param="child_id")
        ttl_s = None if ttl_s is None else self._settings.checked_ttl_s(ttl_s)
        key, child_key = (tenant, session_id), (tenant, child_id)
        child, is_new = self._sessions.fork(key, child_key, at_turn, now_s=now_s)
        if is_new:
            self.leases.fork(key, child_key, child.token_ids, ttl_s=ttl_s, now_s=now_s)
        return {"info": self._info(child_key, now_s=now_s)}

    def rewind(self, *, tenant: str, session_id: str, turn: int, now_s: float) -> dict[str, Any]:
        """Return the session to the end of an earlier turn; its lease keeps what it has in common with that."""
        key = (tenant, session_id)
        session = self._sessions.rewind(key, turn, now_s=now_s)
        self.leases.rewind(key, session.token_ids, now_s=now_s)
        return {"info": self._info(key, now_s=now_s)}

    def end(self, *, tenant: str, session_id: str, now_s: float) -> dict[str, Any]:
        """Give the lease back and forget the session, a running turn with it; `info` is its last state."""
        key = (tenant, session_id)
        self._sessions.require(key, now_s=now_s)
        self.leases.release(key, now_s=now_s)
        info = self._info(key, now_s=now_s)
        self._sessions.end(key, now_s=now_s)
        return {"info": info}

    def get(self, *, tenant: str, session_id: str, now_s: float) -> dict[str, Any]:
        """Look at a session without using it; the result also has `is_running` and `last_report` (see `settle`)."""
        self.sweep(now_s=now_s)
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise session_is_unknown(session_id)
        return self._shown(session, now_s=now_s)

    def list_sessions(
        self, *, tenant: str | None, now_s: float, limit: int | None = None, after: str | None = None
    ) -> dict[str, Any]:
        """List the sessions of a tenant, or all, or a page: `sessions`, each with `tenant` and what `get` returns."""
        self.sweep(now_s=now_s)
        page, has_more = page_of([s for s in self._sessions if tenant in {None, s.key[0]}], limit, after)
        sessions = [{"tenant": session.key[0], **self._shown(session, now_s=now_s)} for session in page]
        return {"sessions": sessions, "has_more": has_more}

    def metrics(self, *, now_s: float) -> dict[str, Any]:
        """Return `metrics.HOME`, true at this moment, as `{"metrics": {name: [[label values, value], …]}}`."""
        self.sweep(now_s=now_s)
        leases = self.leases.snapshot(now_s=now_s, block_bytes=self._block_bytes)
        return {"metrics": leases | snapshot.of_sessions(self._sessions)}

    # ---------------------------------------------------------------- the scheduler

    def sweep(self, *, now_s: float) -> int:
        """End all that is due, in both tables; return how many."""
        return self.leases.sweep(now_s=now_s) + self._sessions.sweep(now_s=now_s)

    # ---------------------------------------------------------------- steps

    def _forget(self, key: "Key", now_s: float) -> None:
        self.leases.forget(key, now_s=now_s)
        self._gaps.forget(key)
        self._routing.forget(key)

    def _shown(self, session: "Session", *, now_s: float) -> dict[str, Any]:
        return {
            "info": self._info(session.key, now_s=now_s),
            "is_running": session.open_turn is not None,
            "last_report": session.last_report,
        }

    def _info(self, key: "Key", *, now_s: float) -> dict[str, Any]:
        session = self._sessions.get(key)
        return SessionInfo(
            session=key[1],
            turn=session.turn if session is not None else 0,
            lease=self.leases.info(key, now_s=now_s),
            cache=None,
            pool=self.leases.pool(now_s=now_s),
        ).to_json()

    def _lease_reason(self, key: "Key", begun: "Begun") -> "Reason | None":
        session = self._sessions.get(key)
        is_reopened = session is not None and session.is_reopened
        return "home_lost" if begun.lease_reason == "first_turn" and is_reopened else begun.lease_reason

    def _signed(
        self, ticket: "Ticket | None", prompt_ids: "array[int]", fingerprint: str, nonce: str
    ) -> dict[str, Any] | None:
        if ticket is None:
            return None
        return build_ticket(
            self._make_address(ticket.deadline_s),
            ticket_id=ticket.ticket_id,
            block_ids=ticket.block_ids,
            num_tokens=ticket.num_tokens,
            prompt_ids=prompt_ids,
            fingerprint=fingerprint,
            nonce=nonce,
            secret=self._secret,
        )
