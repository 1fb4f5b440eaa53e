"""The session table: what was said, by turns, independent of whether any KV is still held for it.

A turn: `check_turn` (may it run?) · `start_turn` · `complete_turn`, or `cancel_turn`. Between turns: `fork` and
`rewind`. Records outlive leases: with the token ids of the last turn a session continues exactly even when all its
blocks are gone. Bounded by number, bytes and time since the last use (`session_store`); records of running turns are
never dropped. Every verb is O(1), amortised, but for what one history is long and, to make room, for the tenants. May
import the standard library, `bidikv_sdk.{wire, prefix}` and its neighbours; texts are opaque bytes here.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from .errors import (
    TURN_RETRY_AFTER_S,
    CapacityExceeded,
    TurnConflict,
    session_is_unknown,
    turn_is_not_open,
    turn_is_running,
)
from .session_record import OpenTurn, Session
from .session_store import SessionStore

if TYPE_CHECKING:
    from array import array

    from .records import Key
    from .settings import HomeSettings

# Sessions end slowly; asking much earlier finds the store as full.
_CAPACITY_RETRY_AFTER_S: Final = 5.0


class SessionTable:
    """All sessions of one home.

    Args:
        settings: limits and times.
        on_drop: called with the key of each session that is dropped, for whatever reason, and with `now_s`.
        first_revision: of histories; a table that takes another's place begins elsewhere, so that none of its
            histories passes for one of that.
    """

    def __init__(
        self, settings: "HomeSettings", *, on_drop: "Callable[[Key, float], None]", first_revision: int = 0
    ) -> None:
        self._settings = settings
        self._on_drop = on_drop
        self._store = SessionStore(max_sessions=settings.max_sessions, max_bytes=settings.max_session_bytes)
        self._running: dict[str, Session] = {}
        """By the nonce of the turn."""
        self._last_revision = first_revision

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._store)

    def __iter__(self) -> Iterator[Session]:
        """Iterate all sessions, the running ones first."""
        return iter(self._store)

    @property
    def num_running(self) -> int:
        """Sessions whose turn runs."""
        return self._store.num_running

    @property
    def num_bytes(self) -> int:
        """What all records take, about."""
        return self._store.num_bytes

    # ---------------------------------------------------------------- sessions

    def open(self, key: "Key", chunk: bytes, *, turn: int, replace: bool, now_s: float) -> Session:
        """Return the session, new or as it is; with `replace` its transcript becomes `chunk`.

        What a replaced session knew of its ids and its last reply is forgotten with the transcript.

        Args:
            key: the session.
            chunk: the history so far.
            turn: the number of turns in it.
            replace: whether an existing session is to be overwritten.
            now_s: monotonic seconds.

        Raises:
            TurnConflict: the session exists with another number of turns, or a turn of it runs; nothing
            changed. CapacityExceeded: there is no room for it; nothing changed.
        """
        self.sweep(now_s=now_s)
        session = self.get(key)
        if session is not None and not replace:
            if session.turn != turn:
                msg = (
                    f"session {key[1]!r} has completed {session.turn} turns, not {turn}: "
                    "continue there, or set 'replace'"
                )
                raise TurnConflict(msg, expected_turn=session.turn + 1)
            self._touch(session, now_s=now_s)
            return session
        if session is not None and session.open_turn is not None:
            raise turn_is_running(key[1])
        is_reopened = turn > 0 if session is None else session.is_reopened
        opened = Session(key, turn, [chunk], is_reopened=is_reopened, last_used_s=now_s)
        if session is not None:
            opened.replaced = session.replaced or (session.transcript if session.token_ids else [])
        opened.num_bytes = opened.counted_bytes()
        if session is None:
            self._make_room(opened.num_bytes, 1, keep=None, key=key, now_s=now_s)
        else:
            self._touch(session, now_s=now_s)
            self._make_room(opened.num_bytes - session.num_bytes, 0, keep=session, key=key, now_s=now_s)
            self._remove(session)
        self._add(opened)
        return opened

    def fork(self, key: "Key", child_key: "Key", at_turn: int | None, *, now_s: float) -> tuple[Session, bool]:
        """Return a child that has a session's history up to a turn, and whether it is new.

        A child that this fork has made before is returned as it is, whatever it has done since.

        Args:
            key: the parent, of the same tenant.
            child_key: the child, another key.
            at_turn: completed turns of the parent that the child has; None for all.
            now_s: monotonic seconds.

        Raises:
            SessionNotFound: the parent is unknown. TurnConflict: a turn of the parent runs (with `retry_after_s`),
            its turns are not known up to there, or the child's key is taken (with `expected_turn`).
            CapacityExceeded: there is no room for it. Nothing changed.
        """
        self.sweep(now_s=now_s)
        child = self.get(child_key)
        if child is not None:
            if child.origin is None or child.origin[0] != key[1] or at_turn not in {None, child.origin[1]}:
                msg = f"session {child_key[1]!r} exists, and is no such fork of {key[1]!r}: choose another id"
                raise TurnConflict(msg, expected_turn=child.turn + 1)
            self._touch(child, now_s=now_s)
            return child, False
        parent = self._at_rest(key, now_s=now_s)
        at_turn = parent.turn if at_turn is None else at_turn
        num_chunks = parent.num_chunks_at(at_turn)
        child = Session(
            child_key,
            parent.turn,
            list(parent.transcript),
            is_reopened=parent.is_reopened,
            last_used_s=now_s,
            token_ids=parent.token_ids,
            id_counts=list(parent.id_counts),
            origin=(key[1], at_turn),
        )
        child.cut(num_chunks)
        child.num_bytes = child.counted_bytes()
        self._make_room(child.num_bytes, 1, keep=parent, key=child_key, now_s=now_s)
        self._add(child)
        return child, True

    def rewind(self, key: "Key", turn: int, *, now_s: float) -> Session:
        """Return a session to the end of an earlier turn, and forget what came behind; idempotent.

        Raises:
            SessionNotFound: the key is unknown. TurnConflict: a turn of it runs (with `retry_after_s`), or its turns
            are not known up to there (with `expected_turn`). Nothing changed.
        """
        session = self._at_rest(key, now_s=now_s)
        session.cut(session.num_chunks_at(turn))
        self._changed(session)
        return session

    def get(self, key: "Key") -> Session | None:
        """Return a session as it is; None for an unknown key."""
        return self._store.get(key)

    def require(self, key: "Key", *, now_s: float) -> Session:
        """Return a session and count this as a use.

        Raises:
            SessionNotFound: the key is unknown.
        """
        self.sweep(now_s=now_s)
        session = self.get(key)
        if session is None:
            raise session_is_unknown(key[1])
        self._touch(session, now_s=now_s)
        return session

    def end(self, key: "Key", *, now_s: float) -> bool:
        """Drop a session, running or not; return whether it was known."""
        self.sweep(now_s=now_s)
        session = self.get(key)
        if session is not None:
            self._drop(session, now_s=now_s)
        return session is not None

    # ---------------------------------------------------------------- turns

    def check_turn(self, key: "Key", turn: int | None, idempotency_key: str, *, now_s: float) -> bytes | None:
        """Return None where turn number `turn` (None: the next) may start now, or the reply where it is a repetition.

        Only the last completed turn repeats, with its own non-empty key.

        Raises:
            SessionNotFound: the key is unknown. TurnConflict: a turn runs (with `retry_after_s`), or the
            number does not fit (with `expected_turn`).
        """
        session = self.require(key, now_s=now_s)
        if turn == session.turn and session.last_reply is not None and idempotency_key:
            last_key, reply = session.last_reply
            if last_key == idempotency_key:
                return reply
        if session.open_turn is not None:
            raise turn_is_running(key[1])
        if turn not in {None, session.turn + 1}:
            msg = f"turn {turn} does not follow the {session.turn} completed turns of session {key[1]!r}"
            raise TurnConflict(msg, expected_turn=session.turn + 1)
        return None

    def start_turn(
        self,
        key: "Key",
        turn: int,
        idempotency_key: str,
        nonce: str,
        *,
        now_s: float,
        revision: int | None = None,
        num_kept: int | None = None,
    ) -> bytes | None:
        """Start a turn and return None, or start nothing and return the stored reply of a repetition.

        Args:
            key: the session.
            turn: the number that follows its completed turns.
            idempotency_key: of the caller.
            nonce: the turn's name.
            now_s: monotonic seconds.
            revision: of the history that the turn was rendered from; None where it cannot have changed.
            num_kept: chunks of the transcript that the turn continues, 0 for none; None for all.

        Raises:
            SessionNotFound, TurnConflict: as `check_turn`, also where the history has changed; nothing changed.
            CapacityExceeded: running turns alone fill the store; nothing changed.
        """
        reply = self.check_turn(key, turn, idempotency_key, now_s=now_s)
        if reply is not None:
            return reply
        session = self.require(key, now_s=now_s)
        if revision not in {None, session.revision}:
            msg = f"the history of session {key[1]!r} has changed meanwhile: try again"
            raise TurnConflict(msg, retry_after_s=TURN_RETRY_AFTER_S)
        self._make_room(0, 0, keep=session, key=key, now_s=now_s)
        due_s = now_s + self._settings.turn_timeout_s
        num_chunks = len(session.transcript)
        num_kept = num_chunks if num_kept is None else min(num_kept, num_chunks)
        self._store.start(session, OpenTurn(nonce, idempotency_key, due_s, num_kept))
        self._running[nonce] = session
        return None

    def running(self, nonce: str, *, now_s: float) -> Session:
        """Return the session whose open turn this is.

        Raises:
            TurnConflict: no such turn is open.
        """
        self.sweep(now_s=now_s)
        session = self._running.get(nonce)
        if session is None:
            raise turn_is_not_open(nonce)
        return session

    def complete_turn(
        self, nonce: str, token_ids: "array[int]", chunk: bytes, reply: bytes, *, now_s: float, report: bytes = b""
    ) -> Session:
        """Append an open turn to what it keeps of its session.

        Makes room by dropping idle sessions. Where that is not enough the store is over its limit until
        others end, for the turn's work is done; the next start then waits for room.

        Args:
            nonce: of `start_turn`.
            token_ids: [num_tokens], all ids of the history, this turn's included. Kept, not copied.
            chunk: the turn's part of the transcript.
            reply: for a repetition of the turn.
            now_s: monotonic seconds.
            report: what the turn's cache did, for whoever lists sessions.

        Raises:
            TurnConflict: no such turn is open.
        """
        session = self.running(nonce, now_s=now_s)
        open_turn = session.open_turn
        assert open_turn is not None  # noqa: S101 (else it would not run)
        session.cut(open_turn.num_kept)
        session.append(chunk, token_ids)
        # Nobody can ask again for a turn without a key.
        session.last_reply = (open_turn.idempotency_key, reply) if open_turn.idempotency_key else None
        session.last_report, session.is_reopened = report, False
        self._changed(session)
        while (idle := self._store.next_to_go(session.key[0])) is not None:
            self._drop(idle, now_s=now_s)
        self._stop(session, now_s=now_s)
        return session

    def cancel_turn(self, nonce: str, *, now_s: float) -> bool:
        """End an open turn without a trace; return whether it was open (idempotent)."""
        self.sweep(now_s=now_s)
        session = self._running.get(nonce)
        if session is not None:
            self._stop(session, now_s=now_s)
        return session is not None

    def sweep(self, *, now_s: float) -> int:
        """Give up turns that took too long, and drop sessions unused for too long; return how many in all."""
        num_ended = 0
        while (session := self._store.longest_running()) is not None:
            if session.open_turn is None or session.open_turn.due_s > now_s:
                break
            self._stop(session, now_s=now_s)
            num_ended += 1
        while (session := self._store.longest_idle()) is not None:
            if session.last_used_s + self._settings.session_retention_s > now_s:
                break
            self._drop(session, now_s=now_s)
            num_ended += 1
        return num_ended

    # ---------------------------------------------------------------- steps

    def _at_rest(self, key: "Key", *, now_s: float) -> Session:
        session = self.require(key, now_s=now_s)
        if session.open_turn is not None:
            raise turn_is_running(key[1])
        return session

    def _add(self, session: Session) -> None:
        self._store.add(session)
        self._revise(session)

    def _changed(self, session: Session) -> None:
        self._store.resize(session)
        self._revise(session)

    def _revise(self, session: Session) -> None:
        self._last_revision += 1
        session.revision = self._last_revision

    def _touch(self, session: Session, *, now_s: float) -> None:
        session.last_used_s = now_s
        self._store.touch(session)

    def _stop(self, session: Session, *, now_s: float) -> None:
        assert session.open_turn is not None  # noqa: S101 (only running sessions stop)
        del self._running[session.open_turn.nonce]
        session.last_used_s = now_s
        self._store.stop(session)

    def _make_room(self, num_bytes: int, num_sessions: int, *, keep: Session | None, key: "Key", now_s: float) -> None:
        """Drop idle sessions until so much more of a tenant fits beside `keep`; all or nothing."""
        if not self._store.can_fit(num_bytes, num_sessions, keep=keep):
            msg = (
                f"no room for session {key[1]!r} beside {self.num_running} running ones: "
                "retry later, or raise 'max_sessions' or 'max_session_bytes'"
            )
            raise CapacityExceeded(msg, retry_after_s=_CAPACITY_RETRY_AFTER_S)
        while (session := self._store.next_to_go(key[0], num_bytes, num_sessions, keep=keep)) is not None:
            self._drop(session, now_s=now_s)

    def _drop(self, session: Session, *, now_s: float) -> None:
        self._remove(session)
        self._on_drop(session.key, now_s)

    def _remove(self, session: Session) -> None:
        if session.open_turn is not None:
            del self._running[session.open_turn.nonce]
        self._store.remove(session)
