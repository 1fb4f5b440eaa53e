"""The simulated clock: calls what is due, in order of time, and at one time in the order of asking.

A heap and a number, for a turn has four events or more: a library's events, which can be waited for and can fail, take
three times as long.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds that pass from one event to the next."""

    __slots__ = ("_due", "_num_asked", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_asked = 0

    def after(self, delay_s: float, callback: Callable[[Any], None], value: Any = None) -> None:
        """Call back with this value when so many seconds, 0 or more, have passed."""
        self._num_asked += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_asked, callback, value))

    def run(self) -> None:
        """Call all that was asked for, and what that asks for, until nothing is left."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now_s, _, callback, value = pop(due)
            callback(value)
