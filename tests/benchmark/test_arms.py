"""How arms ask: the same prompts on all of them, timed alike, on engines whose caches are empty."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from server_ext.benchmark import engines as engines_module
from server_ext.benchmark.arms import PlainArm, one_engine
from server_ext.benchmark.engines import CannotReset, RunningEngines, empty_cache
from server_ext.benchmark.scenarios import Ask, Continuation, Script

SCRIPT = Script(0, 0.0, "system", ())


def ask(rewind_to: int | None = None) -> Ask:
    """A turn that generates two tokens."""
    return Ask("text", 2, 0.0, rewind_to)


def run_plain(*asks: Ask, usage=None):
    """Run turns of a plain arm whose engine answers 7, 8; return what was asked and said."""
    asked = []

    async def complete(prompt_ids, num_tokens, state):
        asked.append((list(prompt_ids), num_tokens))
        yield {"choices": [{"token_ids": [7]}]}
        yield {"choices": [{"token_ids": [8]}], "usage": usage}

    arm = PlainArm("aggregated", complete, lambda script, turn: Continuation(0, [100 + turn]), RunningEngines(None, ()))

    async def talk():
        agent = await arm.open(SCRIPT)
        return [await agent.run(one) for one in asks]

    return asked, asyncio.run(talk())


def test_a_plain_arm_sends_its_whole_history_and_the_recorded_delta():
    """Prompt and answer of each turn come again before the ids that the reference was asked."""
    asked, _ = run_plain(ask(), ask(), ask())
    assert [prompt for prompt, _ in asked] == [[101], [101, 7, 8, 102], [101, 7, 8, 102, 7, 8, 103]]
    assert {num for _, num in asked} == {2}


def test_a_plain_arm_goes_back_where_the_agent_does():
    """Behind a rewind the history is that of the turns that stay."""
    asked, _ = run_plain(ask(), ask(), ask(rewind_to=1))
    assert asked[2][0] == [101, 7, 8, 103]


def test_an_answer_is_timed_by_its_pieces():
    """Time to the first piece, then from piece to piece; ids and what was cached come with it."""
    _, (said,) = run_plain(ask(), usage={"prompt_tokens_details": {"cached_tokens": 5}})
    assert said.ttft_s > 0
    assert len(said.gaps_s) == 1
    assert (said.token_ids, said.num_cached_tokens) == ([7, 8], 5)


def test_a_server_that_answers_in_one_piece_says_when_its_first_token_came():
    """The time that it took for the whole answer is not the time to its first token."""

    async def complete(prompt_ids, num_tokens, state):
        yield {"choices": [{"token_ids": [7, 8]}], "first_token_s": 12.5}

    async def end(state):
        ended.append(state)

    async def talk():
        arm = PlainArm("stock", complete, lambda script, turn: Continuation(0, [1]), RunningEngines(None, ()), end)
        agent = await arm.open(SCRIPT)
        said = await agent.run(ask())
        await agent.close()
        return said

    ended = []
    said = asyncio.run(talk())
    assert (said.ttft_s, said.gaps_s, said.token_ids) == (12.5, [], [7, 8])
    assert len(ended) == 1


def served(answer):
    """Return an HTTP client of engines that answer so."""
    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def test_a_stream_of_a_stock_engine_is_read_to_its_end():
    """Chunks come as they are; comments and the end mark do not."""

    def answer(request):
        assert request.url.path == "/v1/completions"
        return httpx.Response(200, text=': ping\n\ndata: {"choices": [{"token_ids": [1]}]}\n\ndata: [DONE]\n\n')

    async def read():
        return [chunk async for chunk in one_engine(served(answer), "http://d", "m")([1, 2], 4, {})]

    assert asyncio.run(read()) == [{"choices": [{"token_ids": [1]}]}]


def test_an_engine_that_fails_in_the_middle_is_an_error():
    """A stream that ends in an error is no short answer."""

    def answer(_):
        return httpx.Response(200, text='data: {"error": {"message": "out of blocks"}}\n\n')

    async def read():
        return [chunk async for chunk in one_engine(served(answer), "http://d", "m")([1], 4, {})]

    with pytest.raises(RuntimeError, match="out of blocks"):
        asyncio.run(read())


@pytest.fixture
def _no_pause(monkeypatch):
    monkeypatch.setattr(engines_module, "_RESET_PAUSE_S", 0.0)


@pytest.mark.usefixtures("_no_pause")
def test_a_cache_is_emptied_once_no_request_holds_a_block():
    """The engine says no while a request ends, and is asked again."""
    said = iter([False, False, True])
    answer = lambda _: httpx.Response(200, json={"success": next(said)})  # noqa: E731
    asyncio.run(empty_cache(served(answer), "http://p"))
    assert next(said, None) is None


@pytest.mark.usefixtures("_no_pause")
@pytest.mark.parametrize(
    ("status", "told"), [(404, "VLLM_SERVER_DEV_MODE=1"), (200, "does somebody else use it"), (500, "500")]
)
def test_a_cache_that_cannot_be_emptied_ends_the_run(status, told):
    """Turns that hit what another arm left would say nothing; the error says what to do."""
    answer = lambda _: httpx.Response(status, json={"success": False})  # noqa: E731
    with pytest.raises(CannotReset, match=told):
        asyncio.run(empty_cache(served(answer), "http://p"))


def test_counters_are_summed_over_engines_and_series():
    """Bytes of both engines, whatever labels they have; what no engine counts is left out: it is not 0."""
    text = 'vllm:nixl_bytes_transferred_sum{engine="0"} 100\nvllm:nixl_bytes_transferred_sum{engine="1"} 20\n'
    pair = RunningEngines(served(lambda _: httpx.Response(200, text=text)), ("http://p", "http://d"))
    counted = asyncio.run(pair.counters())
    assert counted == {"bytes_moved": 240}
