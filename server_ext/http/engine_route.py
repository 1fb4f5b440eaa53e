"""What an engine is and how it is set, and what D sees of its Ps: the facts behind `bidikv doctor`.

Routes: `GET /v1/bidikv/engine` on P and D (behind vLLM's API keys), `GET /bidikv/engine` on P for its D (behind the
secret), and `GET /v1/bidikv/prefill` on D, which asks that of every P. No reply names a secret, a file or a host.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response

from bidikv_sdk.wire import PROTOCOL
from server_ext.http.errors import Refused
from server_ext.http.prefill_route import PrefillService, prefill_token
from server_ext.http.routes import answers, request_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server_ext.engine.settings import EngineSettings

ENGINE_PATH = "/bidikv/engine"
_PUBLIC_PATH = "/v1/bidikv/engine"
# A P that is up answers this from its API server alone, whatever its engine computes.
_LOOK_TIMEOUT_S = 5.0

router = APIRouter(tags=["bidikv"])


class EngineReport:
    """The facts of this engine, and on D a look at its Ps.

    Args:
        settings: of this engine.
        facts: of the engine underneath (`compat.engine_facts`).
        has_api_keys: whether vLLM asks for a key.
        prompt_tokens_details: whether stock routes tell what was cached.
        transport: in place of the network's, for tests.
    """

    def __init__(
        self,
        settings: EngineSettings,
        facts: Mapping[str, Any],
        *,
        has_api_keys: bool,
        prompt_tokens_details: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {
            "role": settings.role,
            "protocol": PROTOCOL,
            "version": _own_version(),
            **facts,
            "has_api_keys": has_api_keys,
            "prompt_tokens_details": prompt_tokens_details,
        }
        if settings.role == "decode":
            self.facts["num_prefill_urls"] = len(settings.prefill_urls)
            self.facts["settings"] = {
                **asdict(settings.home),
                "prefill_timeout_s": settings.prefill_timeout_s,
                "fresh_prefill_salt": settings.fresh_prefill_salt,
            }
        self._urls = settings.prefill_urls
        self._token = prefill_token(settings.secret)
        self._transport = transport

    def to_json(self) -> dict[str, Any]:
        """Return the facts, with this machine's clock (seconds since 1970)."""
        return {"engine": {**self.facts, "time_s": time.time()}}

    async def look(self) -> list[dict[str, Any]]:
        """Ask every P for its facts, as a turn would reach it; in the order of `prefill_urls`.

        Returns:
            For each P its `state`: `ready` (with `engine`, its facts, and `clock_offset_s`, how much its clock is ahead
            of D's), `unreachable`, `silent` (it did not answer in time, or not HTTP), `other_secret`, `other_role`,
            `no_connector`, `no_plugin`, or `refused` (one of the last four: its API keys keep us from telling which).
        """
        async with httpx.AsyncClient(
            timeout=_LOOK_TIMEOUT_S,
            transport=self._transport,
            trust_env=False,  # as turns: a proxy from the environment has no place between P and D
        ) as http:
            return await asyncio.gather(*(self._look_at(http, url) for url in self._urls))

    async def _look_at(self, http: httpx.AsyncClient, url: str) -> dict[str, Any]:
        asked_s = time.time()
        try:
            reply = await http.get(url + ENGINE_PATH, headers={"Authorization": f"Bearer {self._token}"})
            if not reply.is_success:
                return {"state": await _why_refused(http, url)}
            engine = dict(reply.json()["engine"])
            offset_s = float(engine["time_s"]) - (asked_s + time.time()) / 2
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return {"state": "unreachable"}
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return {"state": "silent"}
        return {"state": "ready", "engine": engine, "clock_offset_s": offset_s}


async def _why_refused(http: httpx.AsyncClient, url: str) -> str:
    """Tell why an engine does not answer holders of our secret, from what it says to everybody."""
    reply = await http.get(url + _PUBLIC_PATH)
    if reply.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return "refused"
    try:
        said = reply.json()
        if reply.is_success:
            return "other_secret" if said["engine"]["role"] == "prefill" else "other_role"
        return "no_connector" if said["error"]["code"] == "session_not_found" else "no_plugin"
    except (ValueError, LookupError, TypeError):
        return "no_plugin"


@router.get(_PUBLIC_PATH)
async def get_engine(raw_request: Request) -> Response:
    """Tell what this engine is."""
    headers = {"X-Request-Id": request_id_of(raw_request)}
    report: EngineReport | None = getattr(raw_request.app.state, "bidikv_engine", None)
    if report is None:
        msg = "this engine has no KV connector; start it with --kv-transfer-config that names BidiKVConnector"
        return Refused(msg, code="session_not_found").to_response(headers)
    return JSONResponse(report.to_json(), headers=headers)


@router.get(ENGINE_PATH, include_in_schema=False)
async def get_engine_for_decode(raw_request: Request) -> Response:
    """Tell D what this P is; 404 for everybody else, as if the route were not there."""
    state = raw_request.app.state
    service: PrefillService | None = getattr(state, "bidikv_prefill", None)
    if service is None or not service.is_allowed(raw_request.headers):
        return JSONResponse({"error": {"message": "Not Found", "code": "not_found"}}, status_code=404)
    report: EngineReport = state.bidikv_engine
    return JSONResponse(report.to_json())


@router.get("/v1/bidikv/prefill")
@answers
async def look_at_prefill(raw_request: Request) -> Response:
    """Tell what D sees of its Ps, in the order of `prefill_urls`."""
    report: EngineReport = raw_request.app.state.bidikv_engine
    return JSONResponse({"prefill": await report.look()}, headers={"X-Request-Id": request_id_of(raw_request)})


def _own_version() -> str:
    try:
        return version("bidikv-sdk")
    except PackageNotFoundError:
        return "unknown"
