"""vLLM's Anthropic route (`/v1/messages`), for callers that name a session.

vLLM answers a message by the chat completion that it is turned into. `attach` puts a step between the two: where the
request names a session, that completion runs in it, by the rules of the chat route. What the client gets is made by
vLLM in either case; how much of its prompt was cached is told as `cache_read_input_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server_ext.engine.compat import ChatCompletionResponse
from server_ext.http.chat_route import SessionTurn
from server_ext.http.errors import Refused
from server_ext.http.naming import named_in

if TYPE_CHECKING:
    from fastapi.requests import Request

    from server_ext.http.conductor import Conductor


def attach(state: Any) -> None:
    """Add sessions to the serving of messages, if this server has one (`state.anthropic_serving_messages`)."""
    serving = getattr(state, "anthropic_serving_messages", None)
    if serving is None:
        return
    conductor: Conductor = state.bidikv_conductor
    stock = serving.create_chat_completion

    async def create_chat_completion(request: Any, raw_request: Request | None = None) -> Any:
        """Complete within the session that the caller names, else as vLLM does."""
        if raw_request is not None:
            said = await raw_request.json()
            named = named_in(said, raw_request.headers, conductor.settings)
            if named is not None:
                body = request.model_dump(mode="json", exclude_unset=True) | {"bidikv": said.get("bidikv") or {}}
                completion = await _in_session(SessionTurn(conductor, named, body), raw_request)
                if completion is not None:
                    return completion
        return await stock(request, raw_request)

    serving.create_chat_completion = create_chat_completion


async def _in_session(turn: SessionTurn, raw_request: Request) -> Any:
    """Return vLLM's completion, or the events of its stream; None where no session can give one."""
    try:
        result = await turn.result(raw_request)
    except Refused:  # a message has no place for what is said to sessions
        return None
    return ChatCompletionResponse.model_validate(result) if isinstance(result, dict) else result
