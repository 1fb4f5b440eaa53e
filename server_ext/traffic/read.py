"""Reads recorded traffic as planned sessions: whatever log or trace `bidikv analyze` reads."""

from collections.abc import Iterator

from server_ext.analysis.formats import Parser
from server_ext.analysis.problems import Problems
from server_ext.analysis.sessions import Sessions
from server_ext.analysis.sources import find_files, read_file
from server_ext.analysis.turns import Turn

from .plan import PlannedSession, PlannedTurn


def read_sessions(paths: list[str], problems: Problems) -> list[PlannedSession]:
    """Return the sessions of logs and traces, files or folders, in the order of their start; the first is at 0.

    Sub-agents are sessions of their own. Turns without times follow each other at once.

    Args:
        paths: files and folders.
        problems: where what is odd is counted.

    Raises:
        InputError: a path does not exist.
    """
    planned: dict[int, list[PlannedTurn]] = {}
    starts: dict[int, float] = {}
    grouped = Sessions(problems)
    try:
        for turn in _turns(paths, grouped, problems):
            planned.setdefault(turn.session, []).append(_plan(turn))
            starts.setdefault(turn.session, turn.start_s or 0.0)
    finally:
        grouped.close()
    first_s = min(starts.values(), default=0.0)
    sessions = [PlannedSession(starts[number] - first_s, tuple(turns)) for number, turns in planned.items()]
    return sorted(sessions, key=lambda session: session.start_s)


def _turns(paths: list[str], grouped: Sessions, problems: Problems) -> Iterator[Turn]:
    for path in find_files(paths, problems):
        # A log's requests go into sessions one after the other; those of different files never mix up their lines.
        parser = Parser(problems)
        for _, turn, _ in grouped.turns(parser.parse(read_file(path, problems, lambda _: None))):
            yield turn


def _plan(turn: Turn) -> PlannedTurn:
    is_append = turn.turn == 1 or turn.shared_tokens >= turn.held_before
    kept = turn.held_before if is_append else turn.shared_tokens
    return PlannedTurn(
        gap_s=turn.gap_s or 0.0,
        after_tool=bool(turn.after_tool),
        delta_tokens=max(1, turn.prompt_tokens - kept),
        output_tokens=max(1, turn.output_tokens),
        kept_tokens=None if is_append else kept,
    )
