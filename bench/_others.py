"""Requests without a session: streams of completions on D, and when each of their tokens came.

`Others` keeps a process of its own for them, so that what else the benchmark does cannot delay its clock readings.
Knows nothing of arms; may import the load.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx

from bench._cores import keep_off
from bench._pressure_load import NUM_OTHERS, OTHER_TOKENS, other_prompt

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Self


# Nothing here ends a request early: what is stuck is left when the measurement ends.
_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Other:
    """One request, as its client saw it."""

    prompt_ids: list[int] = field(repr=False)
    sent_s: float
    chunk_s: list[float] = field(default_factory=list, repr=False)
    """When each chunk with tokens came; monotonic seconds."""
    token_ids: list[int] = field(default_factory=list, repr=False)
    cached_tokens: int | None = None
    """Of the prompt, from D's prefix cache; None where the request did not end."""
    error: str | None = None

    def take(self, data: str, now_s: float) -> None:
        """Take one event of the stream."""
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            if choice.get("token_ids"):
                self.chunk_s.append(now_s)
                self.token_ids += choice["token_ids"]
        if chunk.get("usage"):
            details = chunk["usage"].get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0


class Others:
    """The process that asks; `start` returns at once."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=keep_off)
        self._process.submit(time.monotonic).result()  # so that no start-up falls into a measurement

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.shutdown(cancel_futures=True)

    def start(self, url: str, model: str, start_s: float, end_s: float, last_s: float) -> Future[list[Other]]:
        """Ask from `start_s` on, begin nothing after `end_s`, and leave what runs at `last_s`; monotonic seconds."""
        return self._process.submit(_run, url, model, start_s, end_s, last_s)


def _run(url: str, model: str, start_s: float, end_s: float, last_s: float) -> list[Other]:
    return asyncio.run(_ask_all(url, model, start_s, end_s, last_s))


async def _ask_all(url: str, model: str, start_s: float, end_s: float, last_s: float) -> list[Other]:
    others: list[Other] = []

    async def stream(client: httpx.AsyncClient, index: int) -> None:
        number = 0
        while time.monotonic() < end_s:
            other = Other(other_prompt(index, number), time.monotonic())
            others.append(other)
            try:
                await _ask(client, model, other)
            except httpx.HTTPError as error:
                other.error = repr(error)
            if other.error is not None:
                await asyncio.sleep(0.1)  # an engine that refuses everything must not be flooded
            number += 1

    limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        await asyncio.sleep(start_s - time.monotonic())
        tasks = [asyncio.create_task(stream(client, index)) for index in range(NUM_OTHERS)]
        await asyncio.wait(tasks, timeout=last_s - time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return others


async def _ask(client: httpx.AsyncClient, model: str, other: Other) -> None:
    body: dict[str, Any] = {
        "model": model,
        "prompt": other.prompt_ids,
        "max_tokens": OTHER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            other.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                other.take(line[6:], time.monotonic())
