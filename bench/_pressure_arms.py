"""The arms of the pressure run: the same turns on our stack and on stock ones.

An `Arm` conducts turns and ends sessions; its `Pair` is the two engines behind it, with what is asked of them between
measurements. May import the launcher, `_stock` and the load.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench._cores import ONE_THREAD
from bench._pressure_load import ANSWER_TOKENS, BLOCK_SIZE, MAX_MODEL_LEN, POOL_BLOCKS
from bench._reference import Generated, generated
from bench._stock import Handles, StockProxy
from server_ext.launch.command import ROLES, StackConfig
from server_ext.launch.stack import ensure_secret, free_ports
from server_ext.launch.tiny import WIDE, ensure_tiny

if TYPE_CHECKING:
    from pathlib import Path

    from server_ext.launch.command import Role
    from server_ext.launch.stack import Stack

_REST_DEADLINE_S: Final = 45.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn's answer."""

    prompt_ids: list[int]
    token_ids: list[int]
    outcome: str
    """Where the prompt's cache came from; of a stock turn, whether P had a handle."""
    reason: str | None = None
    ticket_blocks: int = 0
    """In open tickets when the turn had ended."""


class Refused(Exception):
    """A turn was answered with an error."""


class Samples:
    """One scrape of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values.setdefault(sample.name, []).append((sample.labels, sample.value))

    def get(self, name: str, **labels: str) -> float:
        """Return a metric, summed over all series that have these labels.

        Raises:
            LookupError: there is none: what is not counted must not read as a zero.
        """
        values = [value for found, value in self._values.get(name, []) if labels.items() <= found.items()]
        if not values:
            msg = f"no metric {name} with the labels {labels} is served"
            raise LookupError(msg)
        return sum(values)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a metric by the values of one label; a value that never occurred may be missing.

        Raises:
            LookupError: there is no such metric.
        """
        self.get(name)
        totals: dict[str, float] = {}
        for found, value in self._values[name]:
            totals[found[label]] = totals.get(found[label], 0.0) + value
        return totals


class Pair:
    """The two engines of an arm; several arms may share one."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._is_over = False
        self.clients = {
            role: httpx.AsyncClient(
                base_url=stack.config.url(role),
                timeout=600.0,  # what is stuck is left when the measurement ends
                trust_env=False,
                # The engines close idle connections after 5 s: one that is about to be closed must not be used.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=1.0),
            )
            for role in ROLES
        }

    def freeze(self) -> None:
        """Stop all of its processes: another pair is measured."""
        for role in ROLES:
            self.stack.kill(role, signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on; harmless once they have been ended."""
        for role in () if self._is_over else ROLES:
            self.stack.kill(role, signal.SIGCONT)

    async def samples(self, role: Role = "decode") -> Samples:
        """Scrape one engine."""
        reply = await self.clients[role].get("/metrics")
        return Samples(reply.raise_for_status().text)

    async def complete(self, role: Role, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Have a completion computed without any cache; return its only choice."""
        reply = await self.clients[role].post("/v1/completions", json=_cold(prompt_ids, num_tokens))
        choice: dict[str, Any] = reply.raise_for_status().json()["choices"][0]
        return choice

    def generate(self, prompt_ids: list[int], num_tokens: int) -> list[Generated]:
        """Have tokens computed without any cache, with how likely they were; waits for them."""
        with httpx.Client(base_url=self.stack.prefill_url, timeout=_REST_DEADLINE_S, trust_env=False) as client:
            body = {**_cold(prompt_ids, num_tokens), "logprobs": 5, "return_tokens_as_token_ids": True}
            reply = client.post("/v1/completions", json=body).raise_for_status().json()
        return generated(reply)

    async def blocks_in_use(self, role: Role) -> int:
        """Return how many blocks nobody could have now, on an engine without other requests."""
        await asyncio.wait_for(self.complete(role, [1000], 1), _REST_DEADLINE_S)  # gauges are those of the last step
        return round((await self.samples(role)).get("vllm:kv_cache_usage_perc") * POOL_BLOCKS)

    async def rest(self, deadline_s: float = _REST_DEADLINE_S) -> int:
        """Wait until no block of either engine is in use; return how many still are at the deadline."""
        end_s = time.monotonic() + deadline_s
        while num_left := sum([await self.blocks_in_use(role) for role in ROLES]):
            if time.monotonic() >= end_s:
                break
            await asyncio.sleep(0.5)
        return num_left

    async def forget(self) -> None:
        """Empty both prefix caches.

        Raises:
            RuntimeError: an engine said no: something is still in use.
        """
        for role in ROLES:
            reply = await self.clients[role].post("/reset_prefix_cache")
            if not reply.raise_for_status().json()["success"]:
                msg = f"the prefix cache of the {role} engine was not reset: blocks are in use"
                raise RuntimeError(msg)

    def stop(self) -> None:
        """End both engines."""
        self.wake()
        self._is_over = True
        self.stack.stop()


def _cold(prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    return {
        "model": WIDE.name,
        "prompt": prompt_ids,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(8),
    }


class Arm(Protocol):
    """One way to serve the sessions."""

    name: str
    pair: Pair

    async def turn(self, conversation: str, number: int, delta: dict[str, Any], prompt_ids: list[int]) -> Answer:
        """Run a session's turn, and return what came.

        Args:
            conversation: the session.
            number: of the turn, from 1.
            delta: its `messages`.
            prompt_ids: the same as token ids, with all before it.

        Raises:
            Refused: it was answered with an error.
        """

    async def end(self, conversation: str) -> None:
        """End a session: it will not come back."""

    async def warm_up(self, prompt_ids: list[int]) -> None:
        """Let each engine read from the other once: the first transfer connects them, and takes far longer."""

    def num_held_blocks(self, samples: Samples) -> int:
        """Return how many of D's blocks are held between turns, given a scrape of now."""

    def num_ticketed_blocks(self, samples: Samples) -> int:
        """Return how many of D's blocks open tickets hold, given a scrape of now."""


class BidiKVArm:
    """Our stack: the session's turns at its home, by plain HTTP."""

    name = "bidikv"

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    async def turn(self, conversation: str, number: int, delta: dict[str, Any], prompt_ids: list[int]) -> Answer:  # noqa: ARG002
        """See `Arm`."""
        body = {
            "model": WIDE.name,
            "session_id": conversation,
            "turn": number,
            **delta,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "bidikv": {"protocol": 1},
        }
        reply = await self._call("POST", conversation, "/turns", json=body)
        (choice,), info = reply["choices"], reply["bidikv"]
        return Answer(
            reply["prompt_token_ids"],
            choice["token_ids"],
            info["cache"]["outcome"],
            info["cache"]["reason"],
            info["pool"]["pending_ticket_blocks"],
        )

    async def end(self, conversation: str) -> None:
        """See `Arm`."""
        await self._call("DELETE", conversation, "")

    async def warm_up(self, prompt_ids: list[int]) -> None:  # noqa: ARG002
        """See `Arm`."""
        for number in (1, 2):
            await self.turn("warm-up", number, {"messages": [{"role": "user", "content": "warm " * 100}]}, [])
        await self.end("warm-up")

    async def _call(self, method: str, conversation: str, path: str, **options: Any) -> dict[str, Any]:
        headers = {"X-Session-ID": conversation}
        try:
            reply = await self.pair.clients["decode"].request(
                method, f"/v1/sessions/{conversation}{path}", headers=headers, **options
            )
        except httpx.HTTPError as error:
            raise Refused(repr(error)) from error
        if not reply.is_success:
            raise Refused(reply.text)
        answer: dict[str, Any] = reply.json()
        return answer

    def num_held_blocks(self, samples: Samples) -> int:
        """See `Arm`."""
        return int(samples.get("bidikv_blocks", state="leased") + samples.get("bidikv_blocks", state="provisional"))

    def num_ticketed_blocks(self, samples: Samples) -> int:
        """See `Arm`."""
        return int(samples.get("bidikv_blocks", state="ticketed"))


class StockArm:
    """A stock pair behind the benchmark's proxy."""

    def __init__(self, name: str, pair: Pair, *, hold_s: float) -> None:
        self.name = name
        self.pair = pair
        self.proxy = StockProxy(
            pair.clients["prefill"], pair.clients["decode"], WIDE.name, Handles(hold_s, block_size=BLOCK_SIZE)
        )

    async def turn(self, conversation: str, number: int, delta: dict[str, Any], prompt_ids: list[int]) -> Answer:  # noqa: ARG002
        """See `Arm`."""
        try:
            token_ids, had_handle = await self.proxy.turn(conversation, prompt_ids, ANSWER_TOKENS)
        except httpx.HTTPStatusError as error:
            raise Refused(error.response.text) from error
        except httpx.HTTPError as error:
            raise Refused(repr(error)) from error
        return Answer(prompt_ids, token_ids, "handle" if had_handle else "no handle")

    async def end(self, conversation: str) -> None:
        """See `Arm`."""
        self.proxy.handles.forget(conversation)

    async def warm_up(self, prompt_ids: list[int]) -> None:
        """See `Arm`. P reads what D holds, and D holds nothing afterwards."""
        answer = await self.turn("warm-up", 1, {}, prompt_ids)
        await self.proxy.prefill("warm-up", prompt_ids + answer.token_ids)

    def num_held_blocks(self, samples: Samples) -> int:  # noqa: ARG002
        """See `Arm`."""
        return self.proxy.handles.num_held_blocks(now_s=time.monotonic())

    def num_ticketed_blocks(self, samples: Samples) -> int:  # noqa: ARG002
        """See `Arm`: stock engines know no tickets."""
        return 0


def our_config(folder: Path, ttl_s: int) -> StackConfig:
    """Return our stack as the run has it: default settings, but for the scaled time to live and the way of turns."""
    prefill, decode = free_ports()
    return StackConfig(
        model=str(ensure_tiny(size=WIDE)),
        served_name=WIDE.name,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(folder),
        kv_cache_bytes=(POOL_BLOCKS + 1) * WIDE.kv_bytes(BLOCK_SIZE),  # one more is vLLM's null block
        max_model_len=MAX_MODEL_LEN,
        # Every turn goes by P, as in the other arms: `auto` computes some on D, which is another comparison.
        settings={"default_ttl_s": float(ttl_s), "default_route": "fetch"},
        extra_env={**ONE_THREAD, "VLLM_SERVER_DEV_MODE": "1"},
    )
