"""The simulated clock, on simpy's: calls what is due, in order of time, and at one time in the order of asking."""

from collections.abc import Callable
from typing import Any

import simpy


class Clock:
    """Seconds that pass from one event to the next."""

    def __init__(self) -> None:
        self._environment = simpy.Environment()

    @property
    def now_s(self) -> float:
        """Simulated seconds since the beginning."""
        return self._environment.now

    def after(self, delay_s: float, callback: Callable[[Any], None], value: Any = None) -> None:
        """Call back with this value when so many seconds, 0 or more, have passed."""
        event = simpy.Timeout(self._environment, delay_s, value)
        event.callbacks.append(lambda due: callback(due.value))

    def run(self) -> None:
        """Call all that was asked for, and what that asks for, until nothing is left."""
        self._environment.run()
