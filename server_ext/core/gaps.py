"""How likely a session returns before a deadline, learned from the gaps between its turns.

A gap runs from the end of a turn (`ended`) to the beginning of the next (`began`). Its logarithm is modelled as
normal, with a mean and a spread for what ended the turn (each tool by name, or a stop, behind which stands a human
or a program), moved by the session's own habit. Some sessions never return: a share for each of the two kinds. All
begin at priors from recorded coding agents, and old gaps fade.

Nothing is correct because of this model; it only ranks. Bounded memory, O(1) per event, deterministic. Pure; imports
nothing of ours but `records.Key`.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .records import Key

TOOL_PREFIX: Final = "tool:"
"""`ended_by` of a turn whose reply calls a tool: this and the tool's name."""

# A tool's name is a client's text.
_MAX_ENDED_BY: Final = 100
# Shorter ones are clocks, not habits; and the logarithm needs a floor.
_MIN_GAP_S: Final = 0.01
# How many gaps the prior of a kind, of a tool, of the share that returns, and of a session's habit is worth: a kind
# is known from tens of thousands, and one busy tool must not stand for all; each tool is soon known by itself.
_PRIOR_KIND_GAPS: Final = 50.0
_PRIOR_TOOL_GAPS: Final = 4.0
_PRIOR_RETURNS: Final = 20.0
_PRIOR_HABIT: Final = 4.0
# Above so many gaps an old one fades: an ending follows the tool's new version, a habit the session's new phase.
_MAX_ENDING_GAPS: Final = 500.0
_MAX_HABIT_GAPS: Final = 16.0
# However regular the past was, the next gap may differ by a few per cent, and the next session may never return.
_MIN_VARIANCE: Final = 0.05**2
_MAX_RETURN_SHARE: Final = 0.999
_SQRT2: Final = math.sqrt(2)


@dataclass(slots=True)
class Ending:
    """What is known of the gaps behind one way to end a turn."""

    mean: float
    """Of the logarithm of the gap in seconds."""
    variance: float
    return_share: float
    """Of the sessions that came back at all."""
    num_gaps: float = _PRIOR_KIND_GAPS
    num_returns: float = _PRIOR_RETURNS

    def learn_gap(self, log_gap: float) -> None:
        """Take one more gap into account."""
        self.num_gaps = self.num_gaps + 1 if self.num_gaps < _MAX_ENDING_GAPS - 1 else _MAX_ENDING_GAPS
        step, deviation = 1 / self.num_gaps, log_gap - self.mean
        self.mean += step * deviation
        self.variance = max((1 - step) * (self.variance + step * deviation * deviation), _MIN_VARIANCE)

    def learn_return(self, *, returned: bool) -> None:
        """Take into account that a session came back, or ended without."""
        self.num_returns = min(self.num_returns + 1, _MAX_ENDING_GAPS)
        share = self.return_share + (returned - self.return_share) / self.num_returns
        self.return_share = min(share, _MAX_RETURN_SHARE)


def tool_prior() -> Ending:
    """Return what holds for a tool of which nothing is known: median 9 s, and all but always a next turn."""
    return Ending(mean=math.log(9), variance=1.61**2, return_share=0.99)


def stop_prior() -> Ending:
    """Return what holds for any other end: median 128 s, and about one in ten is the session's last."""
    return Ending(mean=math.log(128), variance=2.10**2, return_share=0.9)


@dataclass(slots=True)
class Habit:
    """How much longer (above 0) or shorter one session's gaps are than others', in logarithms."""

    shift: float = 0.0
    num_gaps: float = _PRIOR_HABIT

    def learn(self, deviation: float) -> None:
        """Take one more gap into account."""
        self.num_gaps = min(self.num_gaps + 1, _MAX_HABIT_GAPS)
        self.shift += (deviation - self.shift) / self.num_gaps


@dataclass(slots=True)
class _Session:
    """One session's habits, how its last turn ended, and when it was seen last."""

    after_tool: Habit = field(default_factory=Habit)
    after_stop: Habit = field(default_factory=Habit)
    ended_by: str = ""
    seen_s: float = 0.0
    """When its last turn ended; while a turn runs, or after one that came to nothing, when that began."""
    is_away: bool = False
    """Whether a turn has ended and none has begun since."""


class GapModel:
    """The gaps of one home's sessions.

    Args:
        max_sessions: most sessions remembered; the one that was used longest ago is forgotten.
        max_endings: most tools remembered, alike.
    """

    def __init__(self, *, max_sessions: int = 100_000, max_endings: int = 256) -> None:
        self._max_sessions = max_sessions
        self._max_endings = max_endings
        self._sessions: OrderedDict[Key, _Session] = OrderedDict()
        self._tool, self._stop = tool_prior(), stop_prior()
        self._tools: OrderedDict[str, Ending] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of records, of sessions and of tools."""
        return len(self._sessions) + len(self._tools)

    def ended(self, key: "Key", ended_by: str, *, now_s: float) -> None:
        """Note the end of a turn.

        Args:
            key: the session.
            ended_by: `tool:<name>` where the reply calls a tool, else a word that the caller chooses.
            now_s: monotonic seconds.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
        else:
            self._sessions.move_to_end(key)
        session.ended_by, session.seen_s, session.is_away = ended_by[:_MAX_ENDED_BY], now_s, True
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def began(self, key: "Key", *, now_s: float) -> None:
        """Note the beginning of a turn, and learn from the gap before it; an unknown session teaches nothing."""
        session = self._sessions.get(key)
        if session is None or not session.is_away:
            return
        log_gap = math.log(max(now_s - session.seen_s, _MIN_GAP_S))
        learners = self._learners(session.ended_by)
        # The habit is what the ending, learned over all sessions, does not explain.
        self._habit(session).learn(log_gap - learners[-1].mean)
        for learner in learners:
            learner.learn_gap(log_gap)
            learner.learn_return(returned=True)
        session.seen_s, session.is_away = now_s, False

    def forget(self, key: "Key") -> None:
        """Drop what is known of a session; one that was away never came back, which is learned too."""
        session = self._sessions.pop(key, None)
        if session is not None and session.is_away:
            for learner in self._learners(session.ended_by):
                learner.learn_return(returned=False)

    def return_chance(self, key: "Key", deadline_s: float, *, now_s: float) -> float:
        """Return the chance, 0 to 1, that a session's next turn begins by `deadline_s`.

        An unknown session is taken for an average one that has just stopped.
        """
        session = self._sessions.get(key)
        if session is None:
            return _chance(self._stop, 0.0, 0.0, deadline_s - now_s)
        seen_s = session.seen_s
        return _chance(self._ending(session.ended_by), self._habit(session).shift, now_s - seen_s, deadline_s - seen_s)

    def _ending(self, ended_by: str) -> Ending:
        if not ended_by.startswith(TOOL_PREFIX):
            return self._stop
        return self._tools.get(ended_by, self._tool)

    def _learners(self, ended_by: str) -> list[Ending]:
        """Return all that learns of a gap: the kind, and the tool by its name, which starts from its kind."""
        if not ended_by.startswith(TOOL_PREFIX):
            return [self._stop]
        tool = self._tools.get(ended_by)
        if tool is None:
            kind = self._tool
            tool = self._tools[ended_by] = Ending(
                kind.mean, kind.variance, kind.return_share, num_gaps=_PRIOR_TOOL_GAPS
            )
            if len(self._tools) > self._max_endings:
                self._tools.popitem(last=False)
        self._tools.move_to_end(ended_by)
        return [self._tool, tool]

    @staticmethod
    def _habit(session: _Session) -> Habit:
        return session.after_tool if session.ended_by.startswith(TOOL_PREFIX) else session.after_stop


def _chance(ending: Ending, shift: float, idle_s: float, deadline_s: float) -> float:
    """Return the chance that a gap ends between `idle_s` and `deadline_s`, given that it is longer than `idle_s`."""
    if deadline_s <= idle_s:
        return 0.0
    mean, scale = ending.mean + shift, _SQRT2 * math.sqrt(ending.variance)
    later = 0.5 * math.erfc((math.log(max(deadline_s, _MIN_GAP_S)) - mean) / scale)
    still_away = 0.5 * math.erfc((math.log(max(idle_s, _MIN_GAP_S)) - mean) / scale)
    # Who is away may be one of those who never return: the longer it lasts, the likelier.
    returns = ending.return_share * (still_away - later)
    return returns / (ending.return_share * still_away + 1 - ending.return_share)
