"""The session records in memory: how many and how large, in which order they were used, and who makes room for others.

Room is made fairly: the tenant that has most gives first, what it has not used for longest. So no tenant that keeps to
an equal share loses a session to another one that does not. Only `sessions` calls this. Steps are O(1), but for those
that make room, which look at every tenant.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .records import Key
    from .session_record import OpenTurn, Session


@dataclass(slots=True)
class _Tenant:
    idle: "OrderedDict[Key, Session]" = field(default_factory=OrderedDict)
    num_sessions: int = 0
    num_bytes: int = 0


class SessionStore:
    """All records of one home.

    Args:
        max_sessions: most records.
        max_bytes: most bytes that they take together.
    """

    def __init__(self, *, max_sessions: int, max_bytes: int) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        # Both in the order in which they fall due: idle by last use, running by start.
        self._idle: OrderedDict[Key, Session] = OrderedDict()
        self._running: OrderedDict[Key, Session] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._num_bytes = 0
        self._num_idle_bytes = 0

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._idle) + len(self._running)

    def __iter__(self) -> "Iterator[Session]":
        """Iterate all records, of running sessions first."""
        yield from self._running.values()
        yield from self._idle.values()

    @property
    def num_running(self) -> int:
        """Sessions whose turn runs."""
        return len(self._running)

    @property
    def num_bytes(self) -> int:
        """What all records take, about."""
        return self._num_bytes

    def get(self, key: "Key") -> "Session | None":
        """Return a session's record; None for an unknown key."""
        return self._idle.get(key) or self._running.get(key)

    def longest_idle(self) -> "Session | None":
        """Return the session whose last use is longest ago, of those that do not run."""
        return next(iter(self._idle.values()), None)

    def longest_running(self) -> "Session | None":
        """Return the session whose turn has run for longest."""
        return next(iter(self._running.values()), None)

    # ---------------------------------------------------------------- steps

    def add(self, session: "Session") -> None:
        """Take a new record in, idle and just used."""
        tenant = self._tenants.setdefault(session.key[0], _Tenant())
        tenant.num_sessions += 1
        self._count(session, session.num_bytes)
        self._rest(session)

    def remove(self, session: "Session") -> None:
        """Let a record go, running or not."""
        self._leave(session)
        self._count(session, -session.num_bytes)
        tenant = self._tenants[session.key[0]]
        tenant.num_sessions -= 1
        if not tenant.num_sessions:
            del self._tenants[session.key[0]]

    def touch(self, session: "Session") -> None:
        """Make a session, if it is idle, the one that was used last."""
        if session.open_turn is None:
            self._idle.move_to_end(session.key)
            self._tenants[session.key[0]].idle.move_to_end(session.key)

    def start(self, session: "Session", open_turn: "OpenTurn") -> None:
        """Let a turn of an idle session begin."""
        self._leave(session)
        session.open_turn = open_turn
        self._running[session.key] = session

    def stop(self, session: "Session") -> None:
        """Let the turn of a running session end."""
        self._leave(session)
        session.open_turn = None
        self._rest(session)

    def resize(self, session: "Session") -> None:
        """Count anew what a record takes, after it has changed."""
        num_more = session.counted_bytes() - session.num_bytes
        session.num_bytes += num_more
        self._count(session, num_more)
        self._num_idle_bytes += num_more if session.open_turn is None else 0

    # ---------------------------------------------------------------- room

    def can_fit(self, num_bytes: int, num_sessions: int, *, keep: "Session | None") -> bool:
        """Return whether so much more would fit, were all idle sessions but `keep` dropped."""
        num_kept_bytes = self._num_bytes - self._num_idle_bytes + (keep.num_bytes if keep is not None else 0)
        num_kept = len(self._running) + (keep is not None)
        return num_kept_bytes + num_bytes <= self._max_bytes and num_kept + num_sessions <= self._max_sessions

    def next_to_go(
        self, tenant: str, num_bytes: int = 0, num_sessions: int = 0, *, keep: "Session | None" = None
    ) -> "Session | None":
        """Return who makes room for so much more of a tenant; None where it fits, or nobody but `keep` is idle.

        What the tenant asks for counts as its own already.
        """
        is_full = self._num_bytes + num_bytes > self._max_bytes
        if not is_full and len(self) + num_sessions <= self._max_sessions:
            return None

        def use(name: str) -> int:
            has, asks = self._tenants[name], name == tenant
            return has.num_bytes + asks * num_bytes if is_full else has.num_sessions + asks * num_sessions

        def candidate(name: str) -> "Session | None":
            return next((s for s in self._tenants[name].idle.values() if s is not keep), None)

        # Of tenants that have as much, the one whose session has been idle for longer.
        candidates = [(use(name), session) for name in self._tenants if (session := candidate(name)) is not None]
        return max(candidates, key=lambda c: (c[0], -c[1].last_used_s), default=(0, None))[1]

    def _count(self, session: "Session", num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._tenants[session.key[0]].num_bytes += num_bytes

    def _rest(self, session: "Session") -> None:
        self._idle[session.key] = session
        self._tenants[session.key[0]].idle[session.key] = session
        self._num_idle_bytes += session.num_bytes

    def _leave(self, session: "Session") -> None:
        if session.open_turn is None:
            del self._idle[session.key]
            del self._tenants[session.key[0]].idle[session.key]
            self._num_idle_bytes -= session.num_bytes
        else:
            del self._running[session.key]
