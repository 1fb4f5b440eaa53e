"""Test doubles around D's HTTP side: an engine that says what the test wants, a P, and a client that may leave.

Everything between them is the real thing: FastAPI, vLLM's chat serving and renderer, vLLM's detokenizer, our home over
a pool that counts references.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import vllm.plugins
from fastapi import FastAPI
from vllm.entrypoints.anthropic.api_router import attach_router as attach_stock_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_stock_chat
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from bidikv_sdk.prefix import num_blocks
from server_ext.core.home import Home
from server_ext.core.rates import LearnedRates
from server_ext.core.settings import HomeSettings
from server_ext.core.tickets import TICKET_ID_PREFIX, verify
from server_ext.engine.settings import EngineSettings
from server_ext.http import messages_route
from server_ext.http.conductor import Conductor
from server_ext.http.plugin import BidiKVPlugin
from server_ext.http.prefill_route import unpack_ids
from tests.core.fakes import FakePool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
SECRET = b"a secret of the tests, long enough"
EOS_ID = 2
MODEL = "tiny"


def make_settings(**changes: Any) -> EngineSettings:
    """Return D's settings: one P, fetches where the caller says nothing, no minimum for a ticket."""
    home = HomeSettings(budget_fraction=1.0, min_fetch_tokens=1, default_route="fetch")
    values = {
        "role": "decode",
        "secret": SECRET,
        "prefill_urls": ("http://p1",),
        "prefill_timeout_s": 5.0,
        "control_timeout_s": 5.0,
        "fresh_prefill_salt": False,
        "home": home,
    }
    return EngineSettings(**values | changes)


class FakePrefillNode:
    """P: answers as its engine would, or as `answer(body)` says (an `httpx.Response`, or an exception to raise).

    `calls` are the bodies that it got; while `gate` is set to an unset event it keeps D waiting.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: httpx.Response(200, json=self.rightly(body))
        self.gate: asyncio.Event | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one call."""
        body = json.loads(await request.aread())
        self.calls.append(body)
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answer(body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @staticmethod
    def rightly(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return the right answer: what the ticket covers was fetched."""
        num_tokens = len(unpack_ids(body["token_ids"]))
        fetched = body["kv_transfer_params"].get("remote_num_tokens", 0)
        report = {"local_tokens": 0, "fetched_tokens": fetched, "fetch_s": 0.01 if fetched else None, "reason": None}
        report |= {"read_age_s": 0.02 if fetched else None, "fingerprint": "model", "hold_s": 30}
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(num_blocks(num_tokens, BLOCK_SIZE)))],
            "remote_engine_id": "p",
            "remote_request_id": "turn-r",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_blocks_expiry_time": 1e6,
            "remote_prefill_cached_tokens": 0,  # vLLM's own word for what P reused
            "bidikv": report,
        }
        return {"kv_transfer_params": params | changes}


@dataclass
class Script:
    """What the engine says in one turn.

    - `text` or `token_ids`: of the reply; the end-of-turn token follows unless `is_cut`.
    - `fail_after`: raise `error` after so many tokens.
    - `pause_after`: wait for `gate` after so many tokens.
    - `num_cached_tokens`: of the prompt, before it read anything from P; and whether that read fails.
    """

    text: str = "Hello there."
    token_ids: list[int] | None = None
    is_cut: bool = False
    fail_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("the engine broke"))
    pause_after: int | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_cached_tokens: int = 0
    is_read_failing: bool = False


class FakeEngine:
    """An engine client: the control channel leads to a real home, and `generate` follows `script`.

    `requests` are the (prompt ids, sampling parameters, session id) that it got. `fail_op` and `delay_op` are ops whose
    control call fails, or waits for `delay`; of `delay_reply_op` the reply waits, and as the engine's replies come in
    order, all later ones with it.
    """

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = SimpleNamespace(process_inputs=None)
        self.errored = False
        self.dead_error = None
        self.engine_core = SimpleNamespace(call_utility_async=self._call)
        self.pool = FakePool(200)
        self.now_s = 0.0
        self.rates = LearnedRates()
        self.home = self.make_home()
        self.script = Script()
        self.requests: list[tuple[list[int], Any, str | None]] = []
        self.ops: list[tuple[str, dict[str, Any]]] = []
        self.fail_op = self.delay_op = self.delay_reply_op = ""
        self.delay = asyncio.Event()
        self.num_delayed = self.num_aborted = 0

    def make_home(self, **changes: Any) -> Home:
        """Return a home over the engine's pool, with the settings of these tests but for some."""
        return Home(
            self.pool,
            replace(make_settings().home, **changes),
            block_size=BLOCK_SIZE,
            max_request_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
            incarnation="life",
            secret=SECRET,
            make_address=lambda deadline_s: {"remote_blocks_expiry_time": deadline_s, "remote_engine_id": "d"},
            new_nonce=map("nonce-{}".format, itertools.count()).__next__,
            block_bytes=32_000,
            rates=self.rates,
        )

    async def _call(self, method: str, op: str, arg: dict[str, Any]) -> dict[str, Any]:
        assert method == "bidikv_control"
        arg = msgspec.msgpack.decode(msgspec.msgpack.encode(arg))  # what vLLM's channel does to it
        if op == self.delay_op:
            self.num_delayed += 1
            await self.delay.wait()
        else:
            await asyncio.sleep(0)
        if op == self.fail_op:
            msg = "the engine core is gone"
            raise RuntimeError(msg)
        self.ops.append((op, arg))
        identity = {"fingerprint": "model"} if op == "begin" else {}
        reply = self.home.handle(op, arg | identity, now_s=self.now_s) | identity
        if self.delay_reply_op and (op == self.delay_reply_op or self.num_delayed):
            self.num_delayed += 1
            await self.delay.wait()
        return reply

    def ops_named(self, op: str) -> list[dict[str, Any]]:
        """Return the arguments of all calls of an op."""
        return [arg for name, arg in self.ops if name == op]

    def check_admission(self, num_sequences: int) -> None:
        """Admit everything, as vLLM's engine client does by default."""

    async def is_tracing_enabled(self) -> bool:
        """Tell vLLM's serving that nothing is traced."""
        return False

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, session_id: str | None = None, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """Say what the script says, as vLLM's engine client does; abort where the caller closes."""
        script, tokenizer = self.script, self.renderer.get_tokenizer()
        prompt_ids = prompt["prompt_token_ids"]
        self.requests.append((list(prompt_ids), params, session_id))
        said = script.token_ids if script.token_ids is not None else tokenizer.encode(script.text)
        said = said if script.is_cut else [*said, EOS_ID]
        core_request = EngineCoreRequest(request_id, list(prompt_ids), None, params, None, 0.0, None, None, None)
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, core_request)
        reads = "kv_transfer_params" in (params.extra_args or {}) and not script.is_read_failing
        is_delta, ids = params.output_kind == RequestOutputKind.DELTA, []
        try:
            for i, token_id in enumerate(said):
                if i == script.pause_after:
                    await script.gate.wait()
                if i == script.fail_after:
                    raise script.error
                await asyncio.sleep(0)
                ids.append(token_id)
                is_eos = token_id == EOS_ID
                stop = detokenizer.update([token_id], is_eos)
                is_last = bool(is_eos or stop or i == len(said) - 1 or len(ids) == params.max_tokens)
                if is_delta or is_last:
                    reason = ("stop" if is_eos or stop else "length") if is_last else None
                    text = detokenizer.get_next_output_text(is_last, is_delta)
                    piece = CompletionOutput(0, text, ids[-1:] if is_delta else ids, None, None, None, reason, stop)
                    yield RequestOutput(
                        request_id,
                        None,
                        list(prompt_ids),
                        None,
                        [piece],
                        is_last,
                        num_cached_tokens=len(prompt_ids) if reads else script.num_cached_tokens,
                        kv_transfer_params={"remote_host": "a secret host"} if is_last else None,
                    )
                if is_last:
                    break
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            self._finish(session_id, [*prompt_ids, *ids])

    def _finish(self, nonce: str | None, token_ids: list[int]) -> None:
        """Do what D's scheduler does when a request ends."""
        num_in_cache = len(token_ids) - 1
        if nonce is not None and self.home.leases.is_open(nonce):
            block_ids = self.pool.take(num_blocks(num_in_cache, BLOCK_SIZE))
            self.home.leases.finish(nonce, block_ids, num_in_cache, token_ids[:num_in_cache], now_s=self.now_s)
            self.pool.give_back(block_ids)


def make_online_renderer(
    vllm_config: Any, renderer: Any, template: str | None = None, reasoning_parser: str | None = None
) -> OnlineRenderer:
    """Return the part of vLLM's chat serving that renders, with a chat template of the test."""
    return OnlineRenderer(
        vllm_config.model_config,
        renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
        reasoning_parser=reasoning_parser,
    )


class Stack:
    """D's API server: `app`, its `engine` and `p`, and short ways to call it; `stock` is `app` without our plugin."""

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        self._vllm_config, self._renderer = vllm_config, renderer
        self.engine = FakeEngine(vllm_config, renderer)
        self.p = FakePrefillNode()
        self.app, self.stock = FastAPI(), FastAPI()
        for app in (self.app, self.stock):
            app.state.args = SimpleNamespace(log_error_stack=False)
            init_exception_handler(app)
            attach_stock_chat(app)
            attach_stock_messages(app)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm.plugins, "load_endpoint_plugins", lambda tasks: [BidiKVPlugin()])
            attach_endpoint_plugins(self.app, ("generate",))
        self.configure()

    def configure(
        self,
        *,
        has_keys: bool = False,
        template: str | None = None,
        reasoning_parser: str | None = None,
        **settings: Any,
    ) -> None:
        """Build vLLM's serving and the conductor anew, with a chat template in place of the model's own."""
        online = make_online_renderer(self._vllm_config, self._renderer, template, reasoning_parser=reasoning_parser)
        models = OpenAIServingModels(self.engine, [BaseModelPath(MODEL, MODEL)])
        options = {
            "online_renderer": online,
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": True,
            "tool_parser": "hermes",
            "reasoning_parser": reasoning_parser or "",
        }
        serving = OpenAIServingChat(self.engine, models, "assistant", **options)
        for app in (self.app, self.stock):
            app.state.openai_serving_chat = serving
            app.state.anthropic_serving_messages = AnthropicServingMessages(self.engine, models, "assistant", **options)
        self.app.state.bidikv_conductor = Conductor(
            self.engine,
            serving,
            make_settings(**settings),
            has_keys=has_keys,
            prefill_transport=httpx.MockTransport(self.p),
        )
        messages_route.attach(self.app.state)

    def run(self, scenario: Callable[[httpx.AsyncClient], Any], *, app: FastAPI | None = None) -> Any:
        """Run a scenario with an HTTP client, and let what it left behind finish."""

        async def main() -> Any:
            transport = httpx.ASGITransport(app or self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
                result = await scenario(client)
            await settled()
            return result

        return asyncio.run(main())

    @property
    def num_pinned(self) -> int:
        """References that leases, provisional pins and tickets hold."""
        return self.engine.pool.pinned().total()


async def settled() -> None:
    """Let all other tasks run until none has anything to do at once."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let all other tasks run until a condition holds."""
    while not condition():  # noqa: ASYNC110 - tasks of one loop, nothing to wait for but their turn
        await asyncio.sleep(0)


def turn_body(turn: int, text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """Return the body of a turn with one user message."""
    return {"turn": turn, "messages": [{"role": "user", "content": text}], **fields}


def events_of(text: str) -> list[Any]:
    """Return the data of server-sent events; the last one is `[DONE]`."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def ticket_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the verified ticket that P got, None where it got none."""
    params = verify(body["kv_transfer_params"], SECRET)
    assert params is not None
    is_ticket = str(params.get("remote_request_id", "")).startswith(TICKET_ID_PREFIX)
    return params if is_ticket else None


class Caller:
    """A client at the ASGI level that can leave half-way: `sent` are the messages that it got."""

    def __init__(self, app: Any, method: str, path: str, pieces: list[bytes], headers: dict[str, str] | None = None):
        self._app = app
        names = {"content-type": "application/json"} | (headers or {})
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.encode(), v.encode()) for k, v in names.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for i, piece in enumerate(pieces):
            self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1})
        self.sent: list[dict[str, Any]] = []
        self._arrived = asyncio.Condition()

    def replace_send(self, send: Callable[[dict[str, Any]], Any]) -> None:
        """Put another end to the connection in place of `sent`."""
        self._send = send  # type: ignore[method-assign]

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._arrived:
            self.sent.append(message)
            self._arrived.notify_all()

    def start(self) -> asyncio.Task[None]:
        """Send the request."""
        return asyncio.ensure_future(self._app(self._scope, self._incoming.get, self._send))

    async def wait_for(self, num_messages: int) -> None:
        """Wait until so many messages have come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.sent) >= num_messages)

    def drop_last_piece(self) -> None:
        """Never send the last piece of the body."""
        kept = [self._incoming.get_nowait() for _ in range(self._incoming.qsize())]
        for message in kept[:-1]:
            self._incoming.put_nowait(message)

    def leave(self) -> None:
        """Close the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})
