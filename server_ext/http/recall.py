"""The histories that this process's own turns have left in the home, so that the next turn need not ask for them.

Asking (`load`) waits for a step of a busy engine. A turn that finds its session here renders at once, and the home's
`begin` refuses a history that is not its own any more (another `revision`): then the turn asks after all. Bounded by
bytes and by time since the last turn. Pure.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from server_ext.core.session_record import Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server_ext.core.records import Key


def read_record(key: Key, loaded: Mapping[str, Any]) -> Session:
    """Return what the home's op `load` said of a session."""
    return Session(
        key,
        loaded["info"]["turn"],
        loaded["transcript"],
        is_reopened=False,  # the home's own business
        last_used_s=0.0,
        token_ids=array("i", loaded["token_ids"]),
        id_counts=loaded["id_counts"],
        replaced=loaded["replaced"],
        revision=loaded["revision"],
    )


class Recall:
    """Copies of the records of sessions at rest, as their last turns left them; those used longest ago go first.

    Args:
        max_bytes: that they may take together, about.
        max_age_s: how long one is kept behind its last turn.
    """

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._kept: OrderedDict[Key, Session] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._kept)

    def take(self, key: Key, turn: int | None) -> Session | None:
        """Take out what is known of a session whose turn number `turn` (None: the next) is to run.

        None where nothing is, or where that turn is not the next: a repetition is the home's business. It is taken,
        not lent, so that of two turns at a time one asks the home, which refuses it.
        """
        session = self._kept.get(key)
        return self.forget(key) if session is not None and turn in {None, session.turn + 1} else None

    def keep(self, session: Session, *, now_s: float) -> None:
        """Keep a record as its turn has left it, unless it is too large."""
        self.forget(session.key)
        session.last_used_s, session.num_bytes = now_s, session.counted_bytes()
        if session.num_bytes > self._max_bytes:
            return
        self._kept[session.key] = session
        self._num_bytes += session.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def forget(self, key: Key) -> Session | None:
        """Drop what is known of a session, and return it; None for nothing."""
        session = self._kept.pop(key, None)
        if session is not None:
            self._num_bytes -= session.num_bytes
        return session

    def sweep(self, *, now_s: float) -> float | None:
        """Drop what was not used for too long; return in how many seconds the next is due, None for nothing."""
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            left_s = oldest.last_used_s + self._max_age_s - now_s
            if left_s > 0:
                return left_s
            self.forget(key)
        return None
