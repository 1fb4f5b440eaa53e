"""What vLLM's API server loads (`vllm.endpoint_plugins`): the routes, and what they need once the engine is there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from server_ext.engine import compat
from server_ext.engine.settings import EngineSettings
from server_ext.http import chat_route, engine_route, messages_route, metrics, prefill_route, routes
from server_ext.http.conductor import Conductor
from server_ext.http.engine_route import EngineReport
from server_ext.http.metrics import EngineMetrics, turn_metrics
from server_ext.http.prefill_route import PrefillService
from server_ext.http.transfer_params import RefuseTransferParams

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI


class BidiKVPlugin:
    """Session routes on D, and sessions on its chat route; the prefill route on P. Which it is, the settings say."""

    name = "bidikv_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and refuse transfer parameters on all others.

        Raises:
            RuntimeError: this vLLM is not supported.
        """
        compat.require_supported_version()
        app.include_router(routes.router)
        app.include_router(prefill_route.router)
        app.include_router(engine_route.router)
        app.add_middleware(RefuseTransferParams)
        metrics.attach(app)
        chat_route.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Build the conductor (D) or the prefill service (P).

        Raises:
            ValueError: a bad setting.
            Refused: the chat template cannot render a conversation as text.
        """
        if engine_client is None or engine_client.vllm_config.kv_transfer_config is None:
            return  # a render server, or an engine without a connector: the routes answer that this is no home
        settings = EngineSettings.from_vllm_config(engine_client.vllm_config)
        has_keys = bool(args.api_key or os.environ.get("VLLM_API_KEY"))
        report = EngineReport(
            settings,
            compat.engine_facts(engine_client.vllm_config),
            has_api_keys=has_keys,
            prompt_tokens_details=bool(args.enable_prompt_tokens_details),
        )
        state.bidikv_engine = report
        state.bidikv_metrics = EngineMetrics(engine_client)
        if settings.role == "prefill":
            state.bidikv_prefill = PrefillService(engine_client, settings)
            return
        state.bidikv_conductor = Conductor(engine_client, state.openai_serving_chat, settings, has_keys=has_keys)
        report.facts["appends"] = await state.bidikv_conductor.check_template()
        messages_route.attach(state)
        turn_metrics()  # so that its series exist from the start
