"""The record of one session: its history by turns, and how to cut it between two of them.

Plain data; only `sessions` changes it. `page_of` puts many of them in order.
"""

import heapq
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bidikv_sdk.prefix import common_prefix_length

from .errors import TurnConflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .records import Key

# About what an empty record costs: its objects and its places in the tables.
_RECORD_BYTES: Final = 1024


@dataclass(slots=True)
class OpenTurn:
    """The turn that runs now."""

    nonce: str
    idempotency_key: str
    due_s: float
    """When it is given up (monotonic seconds)."""
    num_kept: int
    """Chunks of the transcript that it continues; what lies behind them goes when it is complete."""


@dataclass(slots=True)
class Session:
    """One session's record."""

    key: "Key"
    turn: int
    """Completed turns."""
    transcript: list[bytes]
    """Chunk 0 as opened, then one per completed turn."""
    is_reopened: bool
    """Opened with turns that another home, or this one before it dropped the record, had completed."""
    last_used_s: float
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """[num_tokens], all ids of the history up to the last completed turn; empty where they are not known. Never
    changed in place: leases share it."""
    id_counts: list[int] = field(default_factory=lambda: [0])
    """[num_chunks], how many of `token_ids` the history had behind each chunk; 0 where they are not known."""
    last_reply: tuple[str, bytes] | None = None
    """Idempotency key and reply of the last completed turn."""
    last_report: bytes = b""
    """What the last completed turn's cache did; empty where that is not known."""
    revision: int = 0
    """Another one whenever the history is."""
    origin: tuple[str, int] | None = None
    """Of a fork: its parent's id, and the turn at which it began."""
    replaced: list[bytes] = field(default_factory=list)
    """The transcript of the last completed turn, where another one has taken its place since: what a lease was computed
    from, so that the next turn can tell what has changed."""
    open_turn: OpenTurn | None = None
    num_bytes: int = 0

    @property
    def first_turn(self) -> int:
        """Turns that chunk 0 contains: earlier ones cannot be told apart."""
        return self.turn + 1 - len(self.transcript)

    def num_chunks_at(self, turn: int) -> int:
        """Return how many chunks the transcript had behind a turn.

        Raises:
            TurnConflict: it is not known.
        """
        if not self.first_turn <= turn <= self.turn:
            msg = f"session {self.key[1]!r} knows its turns {self.first_turn} to {self.turn}, not {turn}"
            raise TurnConflict(msg, expected_turn=self.turn + 1)
        return turn - self.first_turn + 1

    def append(self, chunk: bytes, token_ids: "array[int]") -> None:
        """Take a completed turn; `token_ids` are kept, not copied."""
        # A template that rewrites its history leaves no ids of the turns that it rewrote.
        num_common = common_prefix_length(self.token_ids, token_ids)
        self.id_counts = [count if count <= num_common else 0 for count in self.id_counts]
        self.id_counts.append(len(token_ids))
        self.transcript.append(chunk)
        self.token_ids = token_ids
        self.replaced = []
        self.turn += 1

    def cut(self, num_chunks: int) -> None:
        """Forget all behind the first chunks; without any, the session is like a new one."""
        if num_chunks == len(self.transcript):
            return
        self.turn = self.first_turn - 1 + num_chunks if num_chunks else 0
        self.transcript = self.transcript[:num_chunks] or [b""]
        self.id_counts = self.id_counts[:num_chunks] or [0]
        self.token_ids = self.token_ids[: self.id_counts[-1]]
        self.last_reply, self.last_report = None, b""

    def counted_bytes(self) -> int:
        """Return what the record takes in memory, about."""
        reply_bytes = len(self.last_reply[1]) if self.last_reply is not None else 0
        ids_bytes = self.token_ids.itemsize * len(self.token_ids)
        text_bytes = sum(map(len, self.transcript)) + sum(map(len, self.replaced)) + len(self.last_report)
        return _RECORD_BYTES + text_bytes + ids_bytes + reply_bytes


def page_of(sessions: "Sequence[Session]", limit: int | None, after: str | None) -> "tuple[Sequence[Session], bool]":
    """Return at most `limit` sessions by their ids, from the one behind `after` on, and whether others follow.

    None for `limit` is all of them, in the given order.
    """
    if limit is None:
        return sessions, False
    rest = [session for session in sessions if after is None or session.key[1] > after]
    return heapq.nsmallest(limit, rest, key=lambda session: session.key[1]), len(rest) > limit
