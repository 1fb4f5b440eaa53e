"""Reads how far an engine has come from the lines of its log; pure."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

STAGES = ("started", "imported", "model loaded", "cache ready", "serving", "answered")
"""In this order. The last two are not from the log: `/health` answers; one real token was generated."""

# vLLM may reword any of these lines: a stage that is missed costs a progress message, nothing else.
_SIGNS = {
    "imported": re.compile(r"non-default args"),
    "model loaded": re.compile(r"Loading weights took|Model loading took"),
    "cache ready": re.compile(r"init engine \(profile"),
}
_KEPT_LINES = 30


@dataclass
class LogFollower:
    """Feeds on log text piece by piece; knows the stage reached, and the last lines for an error message."""

    stage: str = STAGES[0]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _rest: str = ""

    def feed(self, text: str) -> None:
        """Take the next piece of the log; lines may be cut anywhere."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self.last_lines.append(line)
            for stage, sign in _SIGNS.items():
                if sign.search(line):
                    self.advance(stage)

    def advance(self, stage: str) -> None:
        """Move on to `stage`; never back."""
        self.stage = max(self.stage, stage, key=STAGES.index)

    def tail(self) -> str:
        """The last lines so far, the unfinished one included."""
        return "\n".join([*self.last_lines, *([self._rest] if self._rest else [])])
