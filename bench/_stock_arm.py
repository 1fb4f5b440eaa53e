"""The stock pair with `bidirectional_kv_xfer` as an arm of the benchmark: its completions, and what they are timed by.

vLLM 0.32 puts the handle that the next turn needs into whole replies only, never into a stream (its own source:
`entrypoints/openai/completion/serving.py`). So D is asked for its whole answer, and the time to the first token is what
the client waited, less the time between D's first and last token as D itself reports it
(`--enable-per-request-metrics`). May import `_stock`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bench._stock import StockProxy
    from server_ext.benchmark.engines import RunningEngines

METRICS_ARGS: Final = ("--enable-per-request-metrics",)
"""What D is started with."""


@dataclass(frozen=True)
class StockCompletions:
    """Completions of a stock pair.

    * **proxy** - that conducts them.
    * **is_prefill_cache_missing** - whether P's own prefix cache shall never hit: as in the arm `fetch`.
    * **now_s** - monotonic seconds.
    """

    proxy: StockProxy
    is_prefill_cache_missing: bool
    now_s: Callable[[], float] = time.perf_counter

    async def complete(
        self, prompt_ids: Sequence[int], num_tokens: int, state: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """Complete a prompt, in one piece; see `server_ext.benchmark.arms.Complete`.

        Raises:
            httpx.HTTPError: an engine refused, or was not there.
        """
        conversation: str = state.setdefault("conversation", secrets.token_hex(8))
        started_s = self.now_s()
        handle = self.proxy.take(conversation)
        computed = await self.proxy.ask_prefill(prompt_ids, handle, **self._options())
        reply = await self.proxy.decode(conversation, prompt_ids, num_tokens, computed["kv_transfer_params"])
        waited_s = self.now_s() - started_s
        choice = reply["choices"][0]
        state["history"] = [*prompt_ids, *choice["token_ids"]]
        yield {
            "choices": [{"token_ids": choice["token_ids"]}],
            "first_token_s": waited_s - reply["metrics"]["generation_time_ms"] / 1e3,
            # P's: to D, all of the prompt comes from elsewhere.
            "usage": computed["usage"],
        }

    async def end(self, state: dict[str, Any]) -> None:
        """Give back what D holds of a conversation that ended, by reading it once more.

        Nothing else but time makes D let go, and conversations that are over would fill its memory while others are
        measured. What a user pays for that is counted (`Handles.end`), and `bench/pressure.py` shows what it does.

        Raises:
            httpx.HTTPError: P refused, or was not there.
        """
        handle = self.proxy.end(state.get("conversation", ""))
        if handle is not None:
            await self.proxy.ask_prefill(state["history"], handle, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"cache_salt": secrets.token_hex(8)} if self.is_prefill_cache_missing else {}


@dataclass
class StockEngines:
    """A stock pair's engines: D says nothing of what it holds, so the proxy's handles tell.

    * **engines** - over HTTP.
    * **proxy** - of the pair.
    * **block_bytes** - of one KV block.
    """

    engines: RunningEngines
    proxy: StockProxy
    block_bytes: int
    _uncounted: Counter[str] = field(default_factory=Counter)
    """What was read only to give back what D held: no user's traffic."""

    async def prepare(self) -> None:
        """Make them run."""
        await self.engines.prepare()

    async def counters(self) -> dict[str, float]:
        """Return what they have counted since they started for users, and byte-seconds held for handles."""
        counted = await self.engines.counters()
        pinned = self.proxy.handles.pinned_block_s * self.block_bytes
        return {**{name: value - self._uncounted[name] for name, value in counted.items()}, "pinned_byte_s": pinned}

    async def give_back(self, completions: StockCompletions, state: dict[str, Any]) -> None:
        """End a conversation (`StockCompletions.end`), and leave what that moved out of the counters.

        Raises:
            httpx.HTTPError: an engine refused, or was not there.
        """
        before = await self.engines.counters()
        await completions.end(state)
        after = await self.engines.counters()
        self._uncounted.update({name: after[name] - before.get(name, 0.0) for name in after})
