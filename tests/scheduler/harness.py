"""vLLM's own schedulers with our connector in them, driven step by step: no engine, no worker, no transfer.

What a CPU engine cannot show (async scheduling, steps in flight, deferred frees, speculative decoding) is shown here on
the same classes that an engine runs. The model's outputs are given by the test.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from server_ext.core.tickets import build_ticket, sign

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm.config import VllmConfig

BLOCK_SIZE = 32
SECRET = b"a secret of the tests, long enough"
STOP_ID = 7
# More than any test's request needs: one that has not finished by then waits for ever.
_MAX_STEPS = 100


def engine_config(model: Path, secret_file: Path, role: str, **settings: Any) -> VllmConfig:
    """Return vLLM's configuration of a P or D with our connector."""
    secret_file.write_bytes(SECRET)
    transfer = KVTransferConfig(
        kv_connector="BidiKVConnector",
        kv_connector_module_path="server_ext.engine.connector",
        kv_role="kv_both" if role == "prefill" else "kv_consumer",
        kv_load_failure_policy="recompute",
        kv_buffer_device="cpu",
        kv_connector_extra_config={
            "bidirectional_kv_xfer": role == "prefill",
            "kv_recompute_threshold": 0,
            "bidikv": {"role": role, "secret_file": str(secret_file), **settings},
        },
    )
    return EngineArgs(
        model=str(model),
        dtype="float32",
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        max_model_len=512,
        kv_transfer_config=transfer,
    ).create_engine_config()


class Harness:
    """One scheduler, its requests, and the steps that it has scheduled but not yet been answered."""

    def __init__(
        self, config: VllmConfig, *, num_blocks: int, is_async: bool = False, num_spec_tokens: int = 0
    ) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = num_blocks + 1  # one is vLLM's null block
        config.scheduler_config.async_scheduling = is_async  # vLLM's own choice on a GPU, and never on a CPU
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        # Start-up refuses a speculative configuration; the scheduler's arithmetic needs no more of it than these.
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = num_spec_tokens
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def num_free(self) -> int:
        """Free blocks of the pool."""
        return self.pool.get_num_free_blocks()

    def control(self, op: str, **arg: Any) -> dict[str, Any]:
        """Call the home as an API server process would; session `s` where none is named."""
        key = {} if op in {"settle", "abandon", "return_ticket"} else {"tenant": "", "session_id": "s"}
        return self.scheduler.connector.control(op, {**key, **arg})

    def begin(self, prompt_ids: list[int], *, turn: int = 1, session_id: str = "s", want_ticket: bool = False) -> Any:
        """Begin a turn; an unknown session is opened."""
        number = {"session_id": session_id, "turn": turn, "idempotency_key": f"{session_id}{turn}"}
        self.control("load", **number)
        way = {"route": "fetch" if want_ticket else "local", "prefill_urls": ["http://p"]}
        return self.control("begin", **number, **way, prompt_ids=array("i", prompt_ids).tobytes())

    def settle(self, begun: dict[str, Any], token_ids: Iterable[int], **arg: Any) -> dict[str, Any]:
        """Settle a turn with all of its tokens."""
        ids = array("i", token_ids)
        arg = {"num_tokens_kept": len(ids), "ttl_s": None, **arg}
        return self.control("settle", nonce=begun["nonce"], token_ids=ids.tobytes(), chunk=b"{}", reply=b"{}", **arg)[
            "info"
        ]

    def add(self, request_id: str, prompt_ids: list[int], **options: Any) -> Request:
        """Add a request; `transfer` are its kv_transfer_params."""
        params = SamplingParams(max_tokens=options.pop("max_tokens", 16), stop_token_ids=[STOP_ID], temperature=0.0)
        params.extra_args = {"kv_transfer_params": options.pop("transfer", None)}
        request = Request(request_id, prompt_ids, params, None, block_hasher=self._hasher, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Schedule one step, without an answer yet."""
        return self.scheduler.schedule()

    def answer(
        self, step: Any, token_id: int = 1, *, sampled: dict[str, list[int]] | None = None, **transfer: Any
    ) -> list[Any]:
        """Answer a step: `token_id` for each request that samples; `transfer` is of KVConnectorOutput.

        `sampled` names requests that sample something else, such as accepted drafts and one token more.

        Returns what goes to the API server for each request that has something.
        """
        req_ids = list(step.num_scheduled_tokens)
        tokens = []
        for req_id in req_ids:
            request = self.scheduler.requests.get(req_id)
            samples = request is not None and request.num_computed_tokens >= request.num_prompt_tokens
            tokens.append((sampled or {}).get(req_id, [token_id] if samples else []))
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(**transfer) if transfer else None,
        )
        outputs = self.scheduler.update_from_output(step, output)
        return [told for client in outputs.values() for told in client.outputs]

    def draft(self, request: Request, token_ids: list[int]) -> None:
        """Propose draft tokens for a request's next step, as a drafter does behind each step."""
        self.scheduler.update_draft_token_ids(DraftTokenIds([request.request_id], [token_ids]))

    def run(self, request: Request, token_id: int = 1) -> None:
        """Run steps until a request has finished."""
        for _ in range(_MAX_STEPS):
            if request.is_finished():
                return
            self.answer(self.step(), token_id)
        msg = f"request {request.request_id} waits for something that never comes ({request.status})"
        raise AssertionError(msg)

    def lease(self, prompt_ids: list[int], session_id: str, *, max_tokens: int = 2) -> dict[str, Any]:
        """Run one turn of a new session to its end; return its `bidikv` object."""
        begun = self.begin(prompt_ids, session_id=session_id)
        request = self.add(f"turn of {session_id}", prompt_ids, max_tokens=max_tokens, session_id=begun["nonce"])
        self.run(request)
        return self.settle(begun, list(request.all_token_ids))

    def abort(self, request: Request) -> None:
        """Abort a request, as a stop string or a client that leaves does."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def ids(num_tokens: int, start: int = 1000) -> list[int]:
    """Return token ids [num_tokens] that no other `start` shares."""
    return list(range(start, start + num_tokens))


def ticket_for(
    p: Harness,
    prompt_ids: list[int],
    num_tokens: int,
    *,
    secret: bytes = SECRET,
    ttl_s: float = 60.0,
    ticket_id: str = "bidikv-ticket-1",
    **other: Any,
) -> dict[str, Any]:
    """Return a ticket of D's on the first tokens of a prompt, for a scheduler of P; `other` are fields of it."""
    address = {
        "remote_engine_id": "d",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_blocks_expiry_time": 1e9,
        "tp_size": 1,
        "bidikv_ttl_s": ttl_s,
    }
    fields = {
        "block_ids": list(range(-(-num_tokens // BLOCK_SIZE))),
        "fingerprint": p.scheduler.connector.connector_scheduler.identity.fingerprint,  # D's own would be equal
        **other,
    }
    return build_ticket(
        address,
        ticket_id=ticket_id,
        num_tokens=num_tokens,
        prompt_ids=prompt_ids,
        nonce="n",
        secret=secret,
        **fields,
    )


def handover_to(d: Harness, *, secret: bytes = SECRET, **other: Any) -> dict[str, Any]:
    """Return what the conductor makes of P's answer for up to two blocks of a prompt; `other` are fields of it."""
    transfer = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p",
        "remote_request_id": "turn-x",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "bidikv_fingerprint": d.scheduler.connector.connector_scheduler.identity.fingerprint,
    }
    return sign(transfer | other, secret)
