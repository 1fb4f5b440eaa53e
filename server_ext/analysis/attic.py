"""Keeps what is remembered of sessions: those used last in memory, within a budget, the others on disk.

So memory does not grow with the number of sessions, and a session that returns after a day is still known.
"""

import pickle
import sqlite3
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sessions import Held

_CACHE_KIB = 256


class Attic:
    """A mapping from session ids to what is remembered of them.

    Args:
        max_bytes: of what lies in memory, by `Held.num_bytes`; the session used last stays there in any case.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._hot: OrderedDict[str, Held] = OrderedDict()
        # Without a name it is a temporary file that only this connection has, and that ends with it.
        self._cold = sqlite3.connect("", isolation_level=None)
        self._cold.execute("pragma journal_mode = off")
        self._cold.execute("pragma synchronous = off")
        self._cold.execute(f"pragma cache_size = -{_CACHE_KIB}")
        self._cold.execute("create table held (key text primary key, data blob) without rowid")

    def get(self, key: str) -> "Held | None":
        """Return what is remembered of a session; None for an unknown one."""
        if (held := self._hot.get(key)) is not None:
            return held
        row = self._cold.execute("select data from held where key = ?", (key,)).fetchone()
        if row is None:
            return None
        self._cold.execute("delete from held where key = ?", (key,))
        found: Held = pickle.loads(row[0])  # noqa: S301 (our own, of this process)
        self.put(key, found)
        return found

    def put(self, key: str, held: "Held") -> None:
        """Remember a session in place of what was remembered of it."""
        self.pop(key)
        self._hot[key] = held
        self._num_bytes += held.num_bytes
        while self._num_bytes > self._max_bytes and len(self._hot) > 1:
            old_key, old = self._hot.popitem(last=False)
            self._num_bytes -= old.num_bytes
            data = pickle.dumps(old, pickle.HIGHEST_PROTOCOL)
            self._cold.execute("insert or replace into held values (?, ?)", (old_key, data))

    def pop(self, key: str) -> None:
        """Forget what lies in memory of a session; a copy on disk is replaced when it moves there again."""
        if (held := self._hot.pop(key, None)) is not None:
            self._num_bytes -= held.num_bytes

    def close(self) -> None:
        """Give the file back."""
        self._cold.close()
