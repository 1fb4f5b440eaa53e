"""Which session a model call of a graph belongs to, and which one it branches off. Pure.

A thread is a session. A run from an earlier checkpoint, and each run of a sub-graph, is a branch of it: a session of
its own, whose id is made of the thread's and of what the branch is, so that every call of the branch finds it again,
from another process too. Every answer carries the session that gave it: a history says where its cache lies.
May import the standard library only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Between a session's id and what tells its branch from others.
_BRANCH: Final = "~"
# Separates the graphs in a checkpoint namespace; the last part of it names the node.
_SUBGRAPH: Final = "|"
_MAX_LENGTH: Final = 128
_DIGEST_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a history: the session that gave it (None: none did), and the number of its turn there."""

    session_id: str | None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """The session of a model call, and the one that shares its cache with it; None: no other."""

    session_id: str
    parent_id: str | None = None


def place_of(thread_id: str, namespace: str, checkpoint_id: str | None, answers: Sequence[Answer]) -> Place:
    """Return where a model call of a graph belongs.

    Args:
        thread_id: The graph's thread; any text.
        namespace: Checkpoint namespace of the running node: `graph:task|…|node:task`.
        checkpoint_id: The checkpoint that the run was asked to begin at; None: the latest.
        answers: The history's answers, oldest first.
    """
    thread = home = session_id_of(thread_id)
    if checkpoint_id:
        home = branch_id(home, checkpoint_id)
    # A node's own name and task change with every step; only the graphs around it make a branch.
    path, _, _ = namespace.rpartition(_SUBGRAPH)
    if path:
        home = branch_id(home, path)
    source = _source(answers)
    if source is None:
        return Place(home, None if home == thread else thread)
    if source == home or source.startswith(home + _BRANCH):
        return Place(source)
    return Place(home, source)


def session_id_of(name: str) -> str:
    """Return a session id for any name: the name itself where it can be one."""
    is_usable = name.isascii() and name.isprintable() and name == name.strip() and not set(name) & {"/", _BRANCH}
    return name if is_usable and name not in {"", ".", ".."} and len(name) <= _MAX_LENGTH else _digest(name, 32)


def branch_id(session_id: str, name: str) -> str:
    """Return the id of a session's branch, the same for the same name."""
    return f"{session_id}{_BRANCH}{_digest(name, _DIGEST_LENGTH)}"


def _source(answers: Sequence[Answer]) -> str | None:
    """Return the session that has the longest part of this history, going by what its answers say of themselves."""
    for num_answers in range(len(answers), 0, -1):
        answer = answers[num_answers - 1]
        # Another number of turns: answers from elsewhere stand before it, or some were left out.
        if answer.session_id is not None and answer.turn == num_answers:
            return answer.session_id
    return None


def _digest(name: str, length: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:length]
