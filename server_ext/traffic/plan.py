"""What a session will do: its turns, in tokens and seconds, without any text."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn. Its prompt is what is kept of the history, and the delta behind it."""

    gap_s: float
    """From the end of the turn before to this one's start; 0 for the first."""
    after_tool: bool
    """Whether the turn before ended with a tool call: then a program comes back, not a human."""
    delta_tokens: int
    """New tokens of the prompt, at least 1; for the first turn all of it."""
    output_tokens: int
    """At least 1."""
    kept_tokens: int | None = None
    """Of the history (the last prompt and its answer), the first so many stay; None: all, the turn only appends."""


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session."""

    start_s: float
    """When its first turn begins."""
    turns: tuple[PlannedTurn, ...]
    """At least one."""


def prompts(session: PlannedSession) -> Iterator[tuple[int, int]]:
    """Yield for each turn how long its prompt is, and how many of these tokens the session held before, in tokens."""
    history = 0
    for turn in session.turns:
        kept = history if turn.kept_tokens is None else min(turn.kept_tokens, history)
        prompt = kept + turn.delta_tokens
        yield prompt, kept
        history = prompt + turn.output_tokens
