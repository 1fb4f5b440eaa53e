"""Real time behind one seam, so that `bidikv_sdk.testing` can move it by hand.

Everything that decides takes `now_s` as an argument; the drivers ask here.
May import the standard library only.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    import threading


class Clock:
    """Monotonic time and the ways of waiting for it, in seconds."""

    def now_s(self) -> float:
        """Return monotonic time."""
        return time.monotonic()

    def sleep(self, delay_s: float) -> None:
        """Block the thread."""
        time.sleep(delay_s)

    async def sleep_async(self, delay_s: float) -> None:
        """Suspend the task."""
        import asyncio  # noqa: PLC0415 - a third of the package's import time, and synchronous users never need it

        await asyncio.sleep(delay_s)

    def wait(self, stop: threading.Event, delay_s: float) -> None:
        """Block the thread until `stop` is set or the delay is over."""
        stop.wait(delay_s)

    async def wait_async(self, stop: asyncio.Event, delay_s: float) -> None:
        """Suspend the task until `stop` is set or the delay is over."""
        import asyncio  # noqa: PLC0415 - as above

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), delay_s)
