"""The ways in which an agent's turns can be served. Each arm opens agents; an agent asks turns and tells what it saw.

`SessionArm` is a session of ours with a forced route; `PlainArm` any stock server that takes token ids, with its whole
history in each request. Both send the same token ids, so that their answers can be compared.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import httpx

    from bidikv_sdk import AsyncBidiKV, AsyncSession, CacheReport
    from bidikv_sdk.wire import Route
    from server_ext.benchmark.scenarios import Ask, Continuation, Script

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
"""Greedy, and as many tokens as were asked for: each arm has the same work."""
_SHORT_PREFILLS: Final = 5
_WARM_UP_IDS: Final = range(100, 300)


@dataclass(slots=True)
class Said:
    """One answer as the client saw it."""

    ttft_s: float = 0.0
    """Seconds from sending the request to the first piece of text."""
    gaps_s: list[float] = field(default_factory=list)
    """[pieces - 1], seconds between one piece of text and the next."""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cache: CacheReport | None = None
    """None where the server does not tell."""
    num_cached_tokens: int = 0
    """What a stock server says that it did not compute."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What an arm's first turns showed."""

    first_s: tuple[float, ...]
    """[turns], seconds to the first token: engines that have just started connect to each other meanwhile."""
    short_prefills: tuple[tuple[int, float], ...] = ()
    """Tokens and seconds of some short prompts, of which nothing was cached; none where the arm cannot tell."""


class Stopwatch:
    """Times the pieces of one answer."""

    def __init__(self) -> None:
        self.said = Said()
        self._started_s = time.perf_counter()
        self._last_s: float | None = None

    def piece(self) -> None:
        """Note that a piece of text came."""
        now_s = time.perf_counter()
        if self._last_s is None:
            self.said.ttft_s = now_s - self._started_s
        else:
            self.said.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s


class Agent(Protocol):
    """One agent's conversation on one arm."""

    async def run(self, ask: Ask) -> Said:
        """Run its next turn."""
        ...

    async def close(self) -> None:
        """End the conversation, and give back what it holds."""
        ...


class Arm(Protocol):
    """One way of serving turns."""

    @property
    def name(self) -> str:
        """As it stands in tables and files."""
        ...

    @property
    def engines(self) -> Engines:
        """That serve it; compared by identity."""
        ...

    async def prepare(self) -> None:
        """Make its engines run and forget what they have cached."""
        ...

    async def counters(self) -> dict[str, float]:
        """Return what its engines have counted since they started (`bytes_moved`, `pinned_byte_s`)."""
        ...

    async def warm_up(self) -> WarmUp:
        """Let its engines do what happens once in their life: connect to each other, fill their own caches."""
        ...

    async def open(self, script: Script) -> Agent:
        """Begin a conversation."""
        ...


class Engines(Protocol):
    """The engines of an arm; several arms may share them."""

    async def prepare(self) -> None:
        """Make them run, and forget what they have cached."""
        ...

    async def counters(self) -> dict[str, float]:
        """Return what they have counted since they started."""
        ...


ROUTES: Final[dict[str, Route]] = {
    "no_reuse": "recompute",
    "prefill_cache": "prefill",
    "local": "local",
    "fetch": "fetch",
    "auto": "auto",
}
"""The arms that one running pair of engines offers, and the route that each forces."""


@dataclass(frozen=True)
class SessionArm:
    """Sessions of ours.

    * **client** - of D.
    * **name** - one of `ROUTES`.
    * **engines** - that serve it.
    * **empty_prefill_cache** - called before each turn where P's own prefix cache shall miss; None leaves it.
    """

    name: str
    client: AsyncBidiKV
    engines: Engines
    empty_prefill_cache: Callable[[], Awaitable[None]] | None = None

    @property
    def route(self) -> Route:
        """Forced on each turn; `auto` lets the server choose."""
        return ROUTES[self.name]

    async def prepare(self) -> None:
        """Make its engines run and forget what they have cached."""
        await self.engines.prepare()

    async def counters(self) -> dict[str, float]:
        """Return what its engines have counted since they started."""
        return await self.engines.counters()

    async def warm_up(self) -> WarmUp:
        """Have each engine read from the other, and time some short prefills."""
        first_s = []
        async with self.client.session(system="Answer briefly. " * 60, route="fetch", **GREEDY) as session:
            for text in ("Hello!", "And again."):
                cache = (await session.send(text, max_completion_tokens=4)).cache
                first_s.append(cache.timings_s.ttft or 0.0)
        points = []
        for _ in range(_SHORT_PREFILLS if self.route == "recompute" else 0):
            async with self.client.session(route="recompute", **GREEDY) as session:
                cache = (await session.send("Hello!", max_completion_tokens=2)).cache
                points.append((cache.prompt_tokens, cache.timings_s.prefill or 0.0))
        return WarmUp(tuple(first_s), tuple(points))

    async def open(self, script: Script) -> Agent:
        """Begin a session."""
        session = self.client.session(system=script.system, route=self.route, **GREEDY)
        return _SessionAgent(session, self.empty_prefill_cache)


@dataclass(frozen=True)
class _SessionAgent:
    session: AsyncSession
    empty_prefill_cache: Callable[[], Awaitable[None]] | None

    async def run(self, ask: Ask) -> Said:
        if ask.rewind_to is not None:
            await self.session.rewind(ask.rewind_to)
        if self.empty_prefill_cache is not None:
            await self.empty_prefill_cache()
        watch = Stopwatch()
        said = watch.said
        options: dict[str, Any] = {"max_completion_tokens": ask.output_tokens, "return_token_ids": True}
        async with self.session.stream(ask.delta, **options) as stream:
            async for chunk in stream:
                extra: dict[str, Any] = dict(chunk)  # vLLM adds the ids to OpenAI's chunks
                said.prompt_ids += extra.get("prompt_token_ids") or []
                for choice in extra["choices"]:
                    ids = choice.get("token_ids") or []
                    said.token_ids += ids
                    if ids or choice["delta"].get("content"):
                        watch.piece()
            said.cache = (await stream.final_turn()).cache
        said.num_cached_tokens = said.cache.reused_tokens + said.cache.fetched_tokens
        return said

    async def close(self) -> None:
        await self.session.end()


class Complete(Protocol):
    """One completion of a stock server, as the chunks of `/v1/completions`.

    A server that answers in one piece says in a chunk of its own, as `first_token_s`, how many seconds after the call
    it had the first token.
    """

    def __call__(
        self, prompt_ids: Sequence[int], num_tokens: int, state: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """Complete a prompt; `state` is the agent's own, and lasts for its conversation."""
        ...


@dataclass(frozen=True)
class PlainArm:
    """A stock server, which knows no sessions.

    * **complete** - how a completion is had: of one engine, or of a pair with what passes between them.
    * **continuation** - how each turn continues the one before it: of script and turn. The reference arm recorded it,
      so that the prompts are the same, token for token.
    * **end** - called with a conversation's state when it ends; None where nothing is left to do.
    """

    name: str
    complete: Complete
    continuation: Callable[[int, int], Continuation]
    engines: Engines
    end: Callable[[dict[str, Any]], Awaitable[None]] | None = None

    async def prepare(self) -> None:
        """Make its engines run and forget what they have cached."""
        await self.engines.prepare()

    async def counters(self) -> dict[str, float]:
        """Return what its engines have counted since they started."""
        return await self.engines.counters()

    async def warm_up(self) -> WarmUp:
        """Complete a prompt, and then the same with more behind it: engines that read from each other connect."""
        state: dict[str, Any] = {}
        ids = list(_WARM_UP_IDS)
        first_s = []
        for _ in range(2):
            said = await _complete(self, ids, 4, state)
            first_s.append(said.ttft_s)
            ids += [*said.token_ids, *_WARM_UP_IDS]
        if self.end is not None:
            await self.end(state)
        return WarmUp(tuple(first_s))

    async def open(self, script: Script) -> Agent:
        """Begin a conversation."""
        return _PlainAgent(self, script.number)


@dataclass
class _PlainAgent:
    arm: PlainArm
    number: int
    histories: list[list[int]] = field(default_factory=list)
    """[turns], prompt and answer of each turn that stays, as token ids."""
    state: dict[str, Any] = field(default_factory=dict)
    num_asked: int = 0

    async def run(self, ask: Ask) -> Said:
        if ask.rewind_to is not None:
            del self.histories[ask.rewind_to :]
        history = self.histories[-1] if self.histories else []
        self.num_asked += 1
        prompt_ids = self.arm.continuation(self.number, self.num_asked).prompt(history)
        said = await _complete(self.arm, prompt_ids, ask.output_tokens, self.state)
        self.histories.append([*prompt_ids, *said.token_ids])
        return said

    async def close(self) -> None:
        self.histories.clear()
        if self.arm.end is not None:
            await self.arm.end(self.state)


async def _complete(arm: PlainArm, prompt_ids: list[int], num_tokens: int, state: dict[str, Any]) -> Said:
    watch = Stopwatch()
    said = watch.said
    said.prompt_ids = list(prompt_ids)
    async for chunk in arm.complete(prompt_ids, num_tokens, state):
        for choice in chunk["choices"]:
            ids = choice.get("token_ids") or []
            said.token_ids += ids
            if ids:
                watch.piece()
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        said.num_cached_tokens = details.get("cached_tokens") or said.num_cached_tokens
        said.ttft_s = chunk.get("first_token_s", said.ttft_s)
    return said


async def stream_completion(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed request to a stock server.

    Raises:
        httpx.HTTPStatusError: The server refused.
        RuntimeError: It failed in the middle; the text is its own.
    """
    async with http.stream("POST", url, json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data in {line, "[DONE]"}:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                msg = f"{url} failed: {chunk['error'].get('message')}"
                raise RuntimeError(msg)
            yield chunk


def one_engine(http: httpx.AsyncClient, url: str, model: str) -> Complete:
    """Return completions of one stock engine."""

    def complete(prompt_ids: Sequence[int], num_tokens: int, state: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        del state  # its prefix cache is the engine's own
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **GREEDY,
        }
        return stream_completion(http, f"{url}/v1/completions", body)

    return complete
