"""LangChain and LangGraph on bidikv: a chat model whose threads are sessions, and a middleware that holds leases.

    model = ChatBidiKV(base_url="http://127.0.0.1:8200/v1", model="smollm2")
    agent = create_agent(model, tools, middleware=[BidiKVMiddleware(model)], checkpointer=InMemorySaver())
    agent.invoke({"messages": [("user", "Which test fails?")]}, {"configurable": {"thread_id": "shelf-1"}})

A model call goes through `_generate` or `_stream` (or their asynchronous twins: finds its session), then
`_get_request_payload` (writes it into the request), then `_create_chat_result` or `_convert_chunk_to_generation_chunk`
(keeps the report). Needs the extra `langchain`. May import the SDK and what that extra brings.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
from langchain_core.runnables.config import ensure_config
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import SecretStr, model_validator

from bidikv_sdk._current import active_session
from bidikv_sdk.integrations._branches import Answer, Place, place_of
from bidikv_sdk.integrations._known import known_session, server_at
from bidikv_sdk.wire import Route  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    import openai
    from langchain.agents.middleware import ToolCallRequest
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessageChunk, BaseMessage, ToolMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableConfig
    from langgraph.runtime import Runtime
    from langgraph.types import Command

    from bidikv_sdk._current import CurrentSession, Server

__all__ = ["BidiKVMiddleware", "ChatBidiKV"]

_REPORT: Final = "bidikv"
_METADATA: Final = "bidikv_session"
_PLACE: Final = "bidikv_place"
# openai's client wants a key; a server without keys takes any.
_NO_KEY: Final = "none"


class ChatBidiKV(BaseChatOpenAI):
    """A chat model on a bidikv server: `ChatOpenAI`'s parameters, and a session for every thread.

    The session of a call is, in this order: the one of `model.bind(session_id="…")`; that of its metadata,
    `config={"metadata": {"bidikv_session": "…"}}`; the `current_session` block around it; and in a graph the thread
    (`thread_id`). There a sub-graph, and a run from an earlier checkpoint (`checkpoint_id`), get a session of their own
    that shares the cache of what it branches off. Without any of these a call is served as by stock vLLM.

    What the server reports lies in `response_metadata["bidikv"]`, and the tokens that were not computed again in
    `usage_metadata["input_token_details"]["cache_read"]`. `base_url` and `api_key` come from `BIDIKV_BASE_URL` and
    `BIDIKV_API_KEY` where they are not given, never from OpenAI's variables.
    """

    route: Route | None = None
    """How prompts get their cache; None: the server decides."""
    ttl_s: float | None = None
    """Seconds that a lease lives after a turn or a renewal; None: the server's default."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Put our defaults in the place of OpenAI's."""
        defaults = {
            ("base_url", "openai_api_base"): os.environ.get("BIDIKV_BASE_URL"),
            ("api_key", "openai_api_key"): os.environ.get("BIDIKV_API_KEY") or _NO_KEY,
            ("use_responses_api",): False,
            ("stream_usage",): True,
        }
        given = dict(values)
        for names, default in defaults.items():
            if all(given.get(name) is None for name in names):
                given[names[0]] = default
        if given["base_url"] is None:
            msg = "no server: pass base_url, or set BIDIKV_BASE_URL, as in http://127.0.0.1:8200/v1"
            raise ValueError(msg)
        return given

    @property
    def _llm_type(self) -> str:
        return "bidikv-chat"

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers fit a schema; as with `ChatOpenAI` the server enforces it by default."""
        options = {"method": method, "include_raw": include_raw, "strict": strict}
        return super().with_structured_output(schema, **options, **kwargs)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- the session of a call

    def session(self, session_id: str) -> CurrentSession:
        """Return a session of this model's server by its id: to hold it, or to give its cache back."""
        return self._session(Place(session_id))

    def _session(self, place: Place) -> CurrentSession:
        options: dict[str, Any] = {"parent_id": place.parent_id, "route": self.route, "ttl_s": self.ttl_s}
        return known_session(place.session_id, self._server(), **options)

    def _server(self) -> Server:
        key = self.openai_api_key
        return server_at(str(self.openai_api_base), key.get_secret_value() if isinstance(key, SecretStr) else None)

    def _place(self, messages: Sequence[BaseMessage], metadata: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, its place among them where it has one."""
        # A graph's configuration is in the context; where a node calls the model in another one, callbacks bring it.
        around = ensure_config()
        metadata = {**around.get("metadata", {}), **metadata}
        if (named := options.pop("session_id", None) or metadata.get(_METADATA)) is not None:
            return {**options, _PLACE: Place(named)}
        if active_session() is not None:
            return options
        config = {**metadata, **around.get("configurable", {})}
        if not config.get("thread_id"):
            return options
        namespace = metadata.get("langgraph_checkpoint_ns") or config.get("checkpoint_ns") or ""
        # Only a run that was asked to begin there has it here; `configurable` is overwritten by then.
        checkpoint_id = metadata.get("checkpoint_id")
        return {**options, _PLACE: place_of(str(config["thread_id"]), namespace, checkpoint_id, _answers(messages))}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        place: Place | None = kwargs.pop(_PLACE, None)
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if place is not None:
            session: CurrentSession | None = self._session(place)
        elif (session := active_session()) is not None:
            session.sent_to(self._server())
        if session is not None:
            payload["extra_body"] = {**session.fields, **(payload.get("extra_body") or {})}
            payload["extra_headers"] = {**session.headers, **(payload.get("extra_headers") or {})}
        return payload

    # ---------------------------------------------------------------- LangChain's own steps

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in pieces; LangChain does not tell `_stream` the metadata of a call."""
        return super().stream(input, config, stop=stop, **_named(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,  # noqa: A002 - as above
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the answer in pieces, as `stream` does."""
        return super().astream(input, config, stop=stop, **_named(config, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._place(messages, _metadata(run_manager), kwargs)
        return super()._generate(messages, stop, run_manager, **options)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._place(messages, _metadata(run_manager), kwargs)
        return await super()._agenerate(messages, stop, run_manager, **options)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._place(messages, _metadata(run_manager), kwargs)
        yield from super()._stream(messages, stop, run_manager, **options)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._place(messages, _metadata(run_manager), kwargs)
        async for chunk in super()._astream(messages, stop, run_manager, **options):
            yield chunk

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        report = response.get(_REPORT) if isinstance(response, dict) else getattr(response, _REPORT, None)
        result = super()._create_chat_result(response, generation_info)
        if report is not None:
            for generation in result.generations:
                generation.generation_info = {**(generation.generation_info or {}), _REPORT: report}
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None and chunk.get(_REPORT) is not None:
            made.generation_info = {**(made.generation_info or {}), _REPORT: chunk[_REPORT]}
        return made


class BidiKVMiddleware(AgentMiddleware[Any, Any, Any]):
    """Keeps an agent's lease alive around each of its tool calls, and gives the cache back when the agent is done.

    Args:
        model: The agent's model.
        release: Whether the cache is given back at the end of a run. False where the thread goes on soon, as in a chat:
            then its lease lives on until it expires.
        ttl_s: Seconds that each renewal asks for; None: the model's own.
    """

    def __init__(self, model: ChatBidiKV, *, release: bool = True, ttl_s: float | None = None) -> None:
        super().__init__()
        self._model = model
        self._release = release
        self._ttl_s = ttl_s

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run a tool while the lease is held."""
        with ExitStack() as stack:
            if (session := self._session_of(request.state)) is not None:
                stack.enter_context(session.hold(self._ttl_s))
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Run a tool while the lease is held."""
        async with AsyncExitStack() as stack:
            if (session := self._session_of(request.state)) is not None:
                await stack.enter_async_context(session.hold(self._ttl_s))
            return await handler(request)

    def after_agent(self, state: Any, runtime: Runtime[Any]) -> None:
        """Give the cache back."""
        if self._release and (session := self._session_of(state)) is not None:
            session.release()

    async def aafter_agent(self, state: Any, runtime: Runtime[Any]) -> None:
        """Give the cache back."""
        if self._release and (session := self._session_of(state)) is not None:
            await session.release_async()

    def _session_of(self, state: Any) -> CurrentSession | None:
        """Return the session that gave the last answer; None where none did."""
        messages = state["messages"] if isinstance(state, dict) else getattr(state, "messages", ())
        answer = next(reversed(_answers(messages)), None)
        return None if answer is None or answer.session_id is None else self._model.session(answer.session_id)


def _metadata(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> dict[str, Any]:
    return {} if run_manager is None else run_manager.metadata


def _named(config: RunnableConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    named = (config or {}).get("metadata", {}).get(_METADATA)
    return options if named is None else {"session_id": named, **options}


def _answers(messages: Sequence[BaseMessage]) -> list[Answer]:
    reports = [m.response_metadata.get(_REPORT) or {} for m in messages if isinstance(m, AIMessage)]
    return [Answer(report.get("session"), report.get("turn", 0)) for report in reports]
