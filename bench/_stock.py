"""Stock vLLM beside ours: two engines with vLLM's own NIXL connector, and the proxy that such a pair needs.

`stock_config` makes the stack, plain P/D or with `bidirectional_kv_xfer`; `StockProxy.turn` conducts a turn as vLLM's
own multi-turn proxy does: P computes, reading what D holds of the last turn where there is a handle for it; D reads
from P and generates; its reply brings the next handle. Both engines get our plugin's pause of NIXL's polling thread,
without which each would burn a core of this machine, and nothing else of ours.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bench._link import on_slow_link
from bidikv_sdk.prefix import num_blocks
from server_ext.launch.command import CPU_NIXL_THREADS, ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import httpx

    from server_ext.launch.command import Role, StackConfig

DEFAULT_HOLD_S: Final = 480
"""How long stock D holds a finished turn's blocks where nothing else is set (`decoder_kv_blocks_ttl`)."""
# Readers decline a handle with 5 s or less left, and the request fails; vLLM's own proxy leaves a margin as well.
_MARGIN_S: Final = 6.0
_NO_HANDLE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def stock_config(
    config: StackConfig, *, bidirectional: bool, hold_s: int | None = None, link: Mapping[str, float] | None = None
) -> StackConfig:
    """Return the same stack on vLLM's own connector.

    Args:
        config: of our stack; what it sets for our plugins has no effect here.
        bidirectional: whether P may read what D holds after a turn.
        hold_s: how long D holds it; None is vLLM's default.
        link: as in `_link.on_slow_link`; None for this machine's own.
    """
    extra_args = {}
    for role in ROLES:
        transfer = on_slow_link(_transfer(role, hold_s, bidirectional=bidirectional), link)
        extra_args[role] = (*config.extra_args.get(role, ()), "--kv-transfer-config", json.dumps(transfer))
    # Only the plugin that pauses NIXL's polling thread; the one with our routes refuses transfer parameters.
    return replace(config, extra_args=extra_args, extra_env={**config.extra_env, "VLLM_PLUGINS": "bidikv"})


def _transfer(role: Role, hold_s: int | None, *, bidirectional: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {"num_threads": CPU_NIXL_THREADS}  # as in our stack
    if bidirectional:
        extra["bidirectional_kv_xfer"] = True
    if bidirectional and hold_s is not None:
        extra["decoder_kv_blocks_ttl"] = hold_s
    return {
        "kv_connector": "NixlConnector",
        # As in our stack: a P that reads as a mere producer could have its blocks reused while it does.
        "kv_role": "kv_both" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }


@dataclass(frozen=True, slots=True)
class Handle:
    """What D said of a finished turn's blocks, good for one read."""

    params: dict[str, Any]
    since_s: float
    num_blocks: int


class Handles:
    """The handles of a proxy, and what D holds for all that were given out. Pure.

    Args:
        hold_s: how long D holds a turn's blocks; 0 where it holds nothing.
        block_size: tokens per block.
    """

    def __init__(self, hold_s: float, *, block_size: int) -> None:
        self._hold_s = hold_s
        self._block_size = block_size
        self._of_conversation: dict[str, Handle] = {}
        self._held: dict[str, Handle] = {}
        self.pinned_block_s = 0.0
        """Blocks times seconds that D held them, of the handles that were read, and of those that never will be."""

    def put(self, conversation: str, params: dict[str, Any] | None, *, now_s: float) -> None:
        """Keep what D's reply brought; None where it brought nothing."""
        if params is None or not self._hold_s:
            return
        handle = Handle(params, now_s, num_blocks(params["remote_num_tokens"], self._block_size))
        self._of_conversation[conversation] = self._held[params["remote_request_id"]] = handle

    def take(self, conversation: str, *, now_s: float) -> dict[str, Any] | None:
        """Return a conversation's handle, once; None where there is none that a reader would still take."""
        handle = self._of_conversation.pop(conversation, None)
        if handle is None or now_s - handle.since_s >= self._hold_s - _MARGIN_S:
            return None
        return handle.params

    def forget(self, conversation: str) -> None:
        """Drop the handle of a conversation that ended. D goes on holding: nobody can tell it not to."""
        self._of_conversation.pop(conversation, None)

    def end(self, conversation: str, *, now_s: float) -> dict[str, Any] | None:
        """Return the handle of a conversation that ended, so that its blocks can be had back by reading them.

        It counts as held for the whole time: nobody but a benchmark would read what it does not need. None where there
        is none that a reader would still take.
        """
        handle = self._of_conversation.get(conversation)
        params = self.take(conversation, now_s=now_s)
        if handle is not None:
            self.pinned_block_s += handle.num_blocks * self._hold_s
        if params is not None:
            self._held.pop(params["remote_request_id"], None)
        return params

    def read(self, params: dict[str, Any], *, now_s: float) -> None:
        """Note that P has read, and so D has let go."""
        handle = self._held.pop(params["remote_request_id"], None)
        if handle is not None:
            self.pinned_block_s += handle.num_blocks * (now_s - handle.since_s)

    def num_held_blocks(self, *, now_s: float) -> int:
        """Return how many blocks D holds for handles."""
        self._held = {id_: held for id_, held in self._held.items() if now_s - held.since_s < self._hold_s}
        return sum(held.num_blocks for held in self._held.values())


class StockProxy:
    """Conducts turns on a stock pair.

    Args:
        prefill: a client of P.
        decode: a client of D.
        model: served name.
        handles: empty.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        prefill: httpx.AsyncClient,
        decode: httpx.AsyncClient,
        model: str,
        handles: Handles,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefill = prefill
        self._now_s = now_s
        self._decode = decode
        self._model = model
        self.handles = handles

    async def turn(self, conversation: str, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], bool]:
        """Return the tokens of a greedy answer, and whether P had a handle.

        Args:
            conversation: its id.
            prompt_ids: the whole prompt.
            num_tokens: length of the answer.

        Raises:
            httpx.HTTPError: an engine refused, or was not there.
        """
        params, had_handle = await self.prefill(conversation, prompt_ids)
        reply = await self.decode(conversation, prompt_ids, num_tokens, params)
        return reply["choices"][0]["token_ids"], had_handle

    async def prefill(self, conversation: str, prompt_ids: Sequence[int]) -> tuple[dict[str, Any], bool]:
        """Have P compute a prompt, and read what D holds of it; return what D needs, and whether there was a handle.

        Raises:
            httpx.HTTPError: P refused, or was not there.
        """
        handle = self.take(conversation)
        reply = await self.ask_prefill(prompt_ids, handle)
        return reply["kv_transfer_params"], handle is not None

    def take(self, conversation: str) -> dict[str, Any] | None:
        """Return a conversation's handle, once; None where there is none that P would still take."""
        return self.handles.take(conversation, now_s=self._now_s())

    def end(self, conversation: str) -> dict[str, Any] | None:
        """Return the last handle of a conversation that ended; None where there is none that P would still take."""
        return self.handles.end(conversation, now_s=self._now_s())

    async def ask_prefill(
        self, prompt_ids: Sequence[int], handle: dict[str, Any] | None, **options: Any
    ) -> dict[str, Any]:
        """Have P compute a prompt, and read what D holds of it under a handle; return P's reply.

        Args:
            prompt_ids: the whole prompt.
            handle: that `Handles` gave; None for none.
            options: more of the request's body.

        Raises:
            httpx.HTTPError: P refused, or was not there.
        """
        asked = _NO_HANDLE if handle is None else {**handle, "do_remote_decode": True, "do_remote_prefill": False}
        reply = await self._post(self._prefill, prompt_ids, 1, asked, options)
        if handle is not None:
            self.handles.read(handle, now_s=self._now_s())
        return reply

    async def decode(
        self, conversation: str, prompt_ids: Sequence[int], num_tokens: int, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Have D generate behind what P computed, keep the handle that it brings, and return D's reply.

        Raises:
            httpx.HTTPError: D refused, or was not there.
        """
        reply = await self._post(self._decode, prompt_ids, num_tokens, params, {})
        self.handles.put(conversation, reply.get("kv_transfer_params"), now_s=self._now_s())
        return reply

    async def _post(
        self,
        client: httpx.AsyncClient,
        prompt_ids: Sequence[int],
        num_tokens: int,
        params: dict[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
            **options,
        }
        reply = await client.post("/v1/completions", json=body)
        answer: dict[str, Any] = reply.raise_for_status().json()
        return answer
