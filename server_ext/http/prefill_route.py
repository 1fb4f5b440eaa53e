"""P's side of a turn: compute a prompt's KV cache, with a ticket or without, and say what became of it.

Only holders of the deployment's secret may call it. The ticket passes through unread: the engine checks it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from array import array
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response

from server_ext.engine.compat import SamplingParams, with_cancellation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server_ext.engine.settings import EngineSettings

PREFILL_PATH = "/bidikv/prefill"
# vLLM's engines name a request to each other in notes that commas, colons and prefixes (also ours) take apart.
REQUEST_PREFIX = "turn-"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
router = APIRouter()


def prefill_token(secret: bytes) -> str:
    """Return the bearer token with which D calls P: derived from the secret, so that the secret itself stays home."""
    return hmac.new(secret, b"bidikv prefill call", hashlib.sha256).hexdigest()


def pack_ids(token_ids: array[int]) -> str:
    """Return token ids [num_tokens] as D sends them: base64 of int32, a sixth of the time of a list for both sides."""
    return base64.b64encode(token_ids.tobytes()).decode()


def unpack_ids(packed: str) -> list[int]:
    """Return what `pack_ids` packed."""
    token_ids = array("i")
    token_ids.frombytes(base64.b64decode(packed))
    return token_ids.tolist()


def engine_request_id(request_id: str) -> str:
    """Return P's name of a turn: the caller's, which comes from outside, without what means something in a note."""
    return REQUEST_PREFIX + _UNSAFE.sub("-", request_id)


class PrefillService:
    """P's engine behind the route."""

    def __init__(self, engine_client: Any, settings: EngineSettings) -> None:
        self._engine_client = engine_client
        self._token = prefill_token(settings.secret)

    def is_allowed(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the caller holds the secret."""
        given = headers.get("authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    async def prefill(self, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        """Compute one prompt.

        Args:
            body: `token_ids` (see `pack_ids`), `kv_transfer_params` (signed), `cache_salt` (str or None).
            request_id: of the turn, for P's log; any text.

        Returns:
            The engine's parameters for the decode side, with the read's report under `bidikv`.
        """
        # One token, greedy, no grammar: P must finish its prefill, D drops what it samples.
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": body["kv_transfer_params"]},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": unpack_ids(body["token_ids"])}
        if body.get("cache_salt"):
            prompt["cache_salt"] = body["cache_salt"]
        transfer = None
        async for output in self._engine_client.generate(prompt, params, engine_request_id(request_id)):
            transfer = output.kv_transfer_params or transfer
        return {"kv_transfer_params": transfer}


# The body is read before a disconnect is listened for, so the inner function does both.
@router.post(PREFILL_PATH, include_in_schema=False)
async def prefill(raw_request: Request) -> Response:
    """Answer D's call; 404 for everybody else, whatever they send, as if the route were not there."""
    service: PrefillService | None = getattr(raw_request.app.state, "bidikv_prefill", None)
    if service is None or not service.is_allowed(raw_request.headers):
        return JSONResponse({"error": {"message": "Not Found", "code": "not_found"}}, status_code=404)
    response: Response | None = await _prefill(service, raw_request, await raw_request.json())
    # None: D has left, nobody reads this.
    return response if response is not None else Response(status_code=499)


@with_cancellation
async def _prefill(service: PrefillService, raw_request: Request, body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(await service.prefill(body, raw_request.headers["x-request-id"]))
