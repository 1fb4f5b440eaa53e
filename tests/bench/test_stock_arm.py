"""The stock pair as an arm of the benchmark."""

import asyncio
from itertools import count

import httpx
import pytest

from bench._stock import Handles, StockProxy
from bench._stock_arm import StockCompletions, StockEngines
from tests.bench.test_stock import handle


class Pair:
    """Two engines that note what they are asked; D says that it generated for 3 s."""

    def __init__(self):
        self.asked = []

    def client(self, name):
        """A client of one engine."""

        def answer(request):
            body = httpx.Response(200, content=request.content).json()
            self.asked.append((name, body))
            number = len(self.asked)
            return httpx.Response(
                200,
                json={
                    "choices": [{"token_ids": [number] * body["max_tokens"]}],
                    "kv_transfer_params": {**handle(number), "from": name},
                    "metrics": {"generation_time_ms": 3000.0},
                    "usage": {"prompt_tokens_details": {"cached_tokens": 64 if name == "P" else 9}},
                },
            )

        return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))

    def completions(self, *, is_prefill_cache_missing=True):
        """An arm's completions; its clock gains 5 s with each look."""
        proxy = StockProxy(self.client("P"), self.client("D"), "m", Handles(480, block_size=32), now_s=lambda: 0.0)
        clock = count(0, 5)
        return StockCompletions(proxy, is_prefill_cache_missing, lambda: float(next(clock)))


async def complete(completions, prompt_ids, state):
    """Return the only chunk."""
    (chunk,) = [chunk async for chunk in completions.complete(prompt_ids, 2, state)]
    return chunk


def test_the_first_token_is_what_was_waited_without_the_rest_of_the_answer():
    """5 s for both engines, of which D generated for 3 s behind its first token; what was cached is P's word."""
    chunk = asyncio.run(complete(Pair().completions(), [1, 2], {}))
    assert chunk["choices"] == [{"token_ids": [2, 2]}]
    assert chunk["first_token_s"] == pytest.approx(2.0)
    assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_the_next_turn_reads_what_d_holds_and_the_end_gives_it_back():
    """The second turn has D's handle; the end reads the last one, and D holds nothing any more."""
    pair = Pair()
    completions, state = pair.completions(), {}

    async def talk():
        await complete(completions, [1, 2], state)
        await complete(completions, [1, 2, 2, 2, 5], state)
        await completions.end(state)
        await completions.end({})  # a conversation without a turn

    asyncio.run(talk())
    assert [name for name, _ in pair.asked] == ["P", "D", "P", "D", "P"]
    sources = [body["kv_transfer_params"].get("from") for name, body in pair.asked if name == "P"]
    assert sources == [None, "D", "D"]
    assert pair.asked[-1][1]["prompt"] == [1, 2, 2, 2, 5, 4, 4]
    assert completions.proxy.handles.num_held_blocks(now_s=0.0) == 0


@pytest.mark.parametrize("is_missing", [True, False])
def test_ps_cache_misses_only_where_it_shall(is_missing):
    """A salt of its own for each of P's prompts, and none for D's: its own cache serves it as always."""
    pair = Pair()
    completions = pair.completions(is_prefill_cache_missing=is_missing)
    for _ in range(2):
        asyncio.run(complete(completions, [1, 2], {}))
    salts = {name: [body.get("cache_salt") for asked, body in pair.asked if asked == name] for name in "PD"}
    assert salts["D"] == [None, None]
    assert len(set(salts["P"])) == (2 if is_missing else 1)
    assert (None in salts["P"]) is not is_missing


def test_what_is_held_for_handles_is_counted_beside_what_the_engines_count():
    """D itself has no such metric."""

    class Engines:
        async def counters(self):
            return {"bytes_moved": 5.0}

    proxy = Pair().completions().proxy
    proxy.handles.pinned_block_s = 7.0
    counted = asyncio.run(StockEngines(Engines(), proxy, 100).counters())
    assert counted == {"bytes_moved": 5.0, "pinned_byte_s": 700.0}


def test_what_is_read_to_give_back_is_no_users_traffic():
    """The benchmark reads a conversation's last handle when it ends; that moves bytes that no agent would move."""
    pair = Pair()
    completions, state = pair.completions(), {}

    class Engines:
        async def counters(self):
            return {"bytes_moved": 10.0 * len(pair.asked), "num_reads": float(len(pair.asked))}

    engines = StockEngines(Engines(), completions.proxy, 100)

    async def talk():
        await complete(completions, [1, 2], state)
        before = await engines.counters()
        await engines.give_back(completions, state)
        return before, await engines.counters()

    before, after = asyncio.run(talk())
    assert (before["bytes_moved"], len(pair.asked)) == (20.0, 3)
    assert (after["bytes_moved"], after["num_reads"]) == (before["bytes_moved"], before["num_reads"])
    assert after["pinned_byte_s"] > before["pinned_byte_s"]
