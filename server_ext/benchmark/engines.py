"""The engines of a benchmark, over HTTP: emptied caches, and what they count.

`RunningEngines` are the user's own, or some that a script started; `pause` and `resume` are the script's.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import httpx

_COUNTERS: Final = {
    "bytes_moved": "vllm:nixl_bytes_transferred_sum",
    "num_reads": "vllm:nixl_bytes_transferred_count",
    "num_preemptions": "vllm:num_preemptions_total",
    "pinned_byte_s": "bidikv_pinned_byte_seconds_total",
}
_RESET_TRIES: Final = 100
_RESET_PAUSE_S: Final = 0.05


class CannotReset(Exception):
    """An engine's prefix cache cannot be emptied; the text says what to do."""


@dataclass
class RunningEngines:
    """Engines that answer at these base URLs.

    * **urls** - without a slash at their end.
    * **resume** - makes their processes run, and those of all others stand still; None where nobody needs to.
    * **can_reset** - whether their caches are to be emptied; not where they hold blocks for a peer.
    """

    http: httpx.AsyncClient
    urls: Sequence[str]
    resume: Callable[[], None] | None = None
    can_reset: bool = True

    async def prepare(self) -> None:
        """Make them run, and forget what they have cached.

        Raises:
            CannotReset: see there.
        """
        if self.resume is not None:
            self.resume()
        if self.can_reset:
            for url in self.urls:
                await empty_cache(self.http, url)

    async def counters(self) -> dict[str, float]:
        """Return what they have counted since they started, summed over the engines; what none counts is left out."""
        text = "\n".join([(await self.http.get(f"{url}/metrics")).text for url in self.urls])
        found = {name: _values(text, metric) for name, metric in _COUNTERS.items()}
        return {name: sum(values) for name, values in found.items() if values}


def prefill_cache_of(http: httpx.AsyncClient, url: str) -> Callable[[], Awaitable[None]]:
    """Return what empties P's prefix cache: as if another P served the turn, or other agents had filled this one's."""

    async def empty() -> None:
        await empty_cache(http, url)

    return empty


async def empty_cache(http: httpx.AsyncClient, url: str) -> None:
    """Empty one engine's prefix cache; leases go with it.

    Raises:
        CannotReset: The engine does not offer it, or blocks stay in use.
    """
    for _ in range(_RESET_TRIES):
        reply = await http.post(f"{url}/reset_prefix_cache")
        if reply.is_success and reply.json()["success"]:
            return
        if reply.status_code == 404:  # noqa: PLR2004 (not found)
            msg = f"{url} has no /reset_prefix_cache; start the engines with VLLM_SERVER_DEV_MODE=1"
            raise CannotReset(msg)
        # A request may have ended for its client, and not yet for the engine.
        await asyncio.sleep(_RESET_PAUSE_S)
    msg = f"{url} did not empty its prefix cache ({reply.status_code}: {reply.text[:200]}); does somebody else use it?"
    raise CannotReset(msg)


def _values(text: str, metric: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{re.escape(metric)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]
