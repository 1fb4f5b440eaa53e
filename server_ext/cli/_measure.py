"""Runs the turns that tell the rates of running engines, through the public API alone.

Order: `Measurement.run`: warm up the pair, prefills of growing length (`recompute`), fetches of growing histories
(computed on D first, so that P has nothing of them), answers side by side, and a prefill beside an answer. Engines must
be idle otherwise.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from server_ext.simulation.fit import BesideSample, DecodeSample, TurnSample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bidikv_sdk import AsyncBidiKV, AsyncSession
    from bidikv_sdk.wire import CacheReport, PoolInfo, Route

# One token each in most vocabularies.
_WORDS: Final = (" the", " time", " people", " water", " place", " year", " good", " work", " line", " small")
_PREFILL_PARTS: Final = (0.02, 0.1, 0.25, 0.5, 1.0)
_HISTORY_PARTS: Final = (0.1, 0.3, 1.0)
_DELTA_WORDS: Final = (20, 120)
_MIN_TOKENS: Final = 24
_BATCHES: Final = (1, 2, 4)
_ANSWER_TOKENS: Final = 40
_LONG_ANSWER: Final = 120
_BESIDE_PARTS: Final = (0.1, 0.2, 0.1, 0.2)
_SHORT_ANSWER: Final = 4
"""A first token that is also the last one is not timed by the server."""
_BLOCK_SIZES: Final = tuple(1 << n for n in range(12))


def words(num_words: int) -> str:
    """Return a text of about so many tokens that no other text begins with."""
    return secrets.token_hex(4) + "".join(_WORDS[n % len(_WORDS)] for n in range(num_words))


@dataclass(slots=True)
class Said:
    """A turn as it came."""

    cache: CacheReport
    pool: PoolInfo
    num_tokens: int
    num_lease_tokens: int
    num_lease_blocks: int
    token_s: float
    """Between two tokens of the answer, on average."""
    ended_s: float


async def say(
    session: AsyncSession,
    text: str,
    *,
    num_tokens: int,
    route: Route | None,
    ttl_s: float | None = None,
    on_token: Callable[[float], None] = lambda _: None,
) -> Said:
    """Run a turn whose answer has exactly so many tokens; `on_token` is told when each comes."""
    first_s = last_s = 0.0
    async with session.stream(
        text, route=route, ttl_s=ttl_s, max_tokens=num_tokens, min_tokens=num_tokens, temperature=0
    ) as stream:
        async for chunk in stream:
            if chunk["choices"]:
                last_s = time.perf_counter()
                first_s = first_s or last_s
                on_token(last_s)
        turn = await stream.final_turn()
    usage = turn.completion.get("usage") or {"completion_tokens": num_tokens}
    given = usage["completion_tokens"]
    return Said(
        cache=turn.cache,
        pool=turn.pool,
        num_tokens=given,
        num_lease_tokens=turn.lease.num_tokens,
        num_lease_blocks=turn.lease.num_blocks,
        token_s=(last_s - first_s) / max(1, given - 1),
        ended_s=last_s,
    )


@dataclass(slots=True)
class Measurement:
    """What was measured.

    Args:
        client: of the decode engine.
        max_tokens: the longest prompt.
        repeats: of every point.
        on_step: told what comes next.
    """

    client: AsyncBidiKV
    max_tokens: int
    repeats: int
    on_step: Callable[[str], None]
    turns: list[TurnSample] = field(default_factory=list)
    decodes: list[DecodeSample] = field(default_factory=list)
    besides: list[BesideSample] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    async def run(self) -> None:
        """Measure everything, in a few minutes on CPUs and in seconds on GPUs."""
        self.on_step("warming up: the first transfer in either direction")
        async with self.client.session() as session:
            for _ in range(2):
                await say(session, words(100), num_tokens=_SHORT_ANSWER, route="fetch")
        for _ in range(self.repeats):
            await self._prefills()
            await self._fetches()
        await self._answers()
        await self._beside()

    async def _prefills(self) -> None:
        for part in _PREFILL_PARTS:
            num_words = max(_MIN_TOKENS, round(part * self.max_tokens))
            self.on_step(f"computing about {num_words} tokens")
            async with self.client.session() as session:
                await self._turn(session, num_words, "recompute")

    async def _fetches(self) -> None:
        for part in _HISTORY_PARTS:
            num_words = max(_MIN_TOKENS * 4, round(part * self.max_tokens))
            for delta_words in _DELTA_WORDS:
                self.on_step(f"fetching about {num_words} tokens, and computing {delta_words}")
                async with self.client.session() as session:
                    local = await say(session, words(num_words), num_tokens=_ANSWER_TOKENS, route="local", ttl_s=600)
                    self.said.append(local)
                    context = local.cache.prompt_tokens + _ANSWER_TOKENS // 2
                    self.decodes.append(DecodeSample(num_sequences=1, context_tokens=context, step_s=local.token_s))
                    await self._turn(session, delta_words, "fetch")

    async def _turn(self, session: AsyncSession, num_words: int, route: Route) -> None:
        said = await say(session, words(num_words), num_tokens=_SHORT_ANSWER, route=route)
        self.said.append(said)
        sample = _sample(said, route)
        if sample is not None:
            self.turns.append(sample)

    async def _answers(self) -> None:
        for num in _BATCHES:
            self.on_step(f"{num} answers at the same time")
            answers = await asyncio.gather(*(self._answer() for _ in range(num)))
            context = sum(one.cache.prompt_tokens + _ANSWER_TOKENS // 2 for one in answers)
            step_s = sum(one.token_s for one in answers) / num
            self.decodes.append(DecodeSample(num_sequences=num, context_tokens=context, step_s=step_s))

    async def _beside(self) -> None:
        """Prefill while an answer streams: engines that share a machine take each other's time."""
        for part in _BESIDE_PARTS:
            num_words = max(_MIN_TOKENS, round(part * self.max_tokens))
            self.on_step(f"computing about {num_words} tokens beside an answer")
            times: list[float] = []
            has_begun = asyncio.Event()

            def on_token(at_s: float, times: list[float] = times, has_begun: asyncio.Event = has_begun) -> None:
                times.append(at_s)
                has_begun.set()

            async with self.client.session() as streaming, self.client.session() as session:
                # As nearly all turns, the measured one is not its session's first, which calls the engine once more.
                await say(session, words(_MIN_TOKENS), num_tokens=_SHORT_ANSWER, route="local")
                answer = asyncio.create_task(
                    say(streaming, words(_MIN_TOKENS), num_tokens=_LONG_ANSWER, route="local", on_token=on_token)
                )
                await has_begun.wait()
                begun_s = time.perf_counter()
                said = await say(session, words(num_words), num_tokens=_SHORT_ANSWER, route="recompute")
                streamed = await answer
            sample = _sample(said, "recompute")
            if sample is None:
                continue
            until_s = begun_s + sample.control_s + sample.prefill_s
            between = [at_s for at_s in times if begun_s <= at_s <= until_s]
            if len(between) > 1 and times[-1] > until_s + sample.handover_s:
                context = streamed.cache.prompt_tokens + _LONG_ANSWER // 2
                step_s = (between[-1] - between[0]) / (len(between) - 1)
                self.besides.append(BesideSample(turn=sample, context_tokens=context, step_s=step_s))

    async def _answer(self) -> Said:
        async with self.client.session() as session:
            return await say(session, words(_MIN_TOKENS), num_tokens=_ANSWER_TOKENS, route="local")

    @property
    def block_size(self) -> int:
        """Tokens per block, as the leases tell; 0 where they do not."""
        return block_size_of([(one.num_lease_tokens, one.num_lease_blocks) for one in self.said])

    def raw(self) -> dict[str, Any]:
        """Return all samples, for the file."""
        from dataclasses import asdict

        return {
            "turns": [asdict(one) for one in self.turns],
            "decodes": [asdict(one) for one in self.decodes],
            "besides": [asdict(one) for one in self.besides],
        }


def _sample(said: Said, route: Route) -> TurnSample | None:
    """Return what a turn tells; None where P had no part in it."""
    cache, took = said.cache, said.cache.timings_s
    if took.prefill is None or took.handover is None:
        return None
    return TurnSample(
        prompt_tokens=cache.prompt_tokens,
        present_tokens=cache.reused_tokens + cache.fetched_tokens,
        fetched_tokens=cache.fetched_tokens,
        handed_tokens=cache.prompt_tokens - (0 if route == "recompute" else cache.held_tokens),
        control_s=(took.render or 0.0) + (took.begin or 0.0),
        prefill_s=took.prefill,
        fetch_s=took.fetch,
        handover_s=took.handover,
    )


def block_size_of(leases: Sequence[tuple[int, int]]) -> int:
    """Return the tokens per block that explain leases of so many tokens and blocks; 0 where none does."""
    known = [(num_tokens, num_blocks) for num_tokens, num_blocks in leases if num_blocks]
    if not known:
        return 0
    return next((size for size in _BLOCK_SIZES if all(-(-tokens // size) == blocks for tokens, blocks in known)), 0)
