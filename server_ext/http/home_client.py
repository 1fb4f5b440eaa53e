"""The way from an API server process into D's engine core, with a deadline for every call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bidikv_sdk.wire import ErrorInfo
from server_ext.engine import compat
from server_ext.http.errors import RETRY_AFTER_S, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

logger = compat.init_logger("vllm.bidikv")


class HomeClient:
    """Calls the ops of `core.home.Home` in the engine core.

    Calls run between the engine's steps: a few milliseconds on an idle engine, up to one step on a busy one.
    """

    def __init__(self, engine_client: Any, *, timeout_s: float) -> None:
        self._engine_client = engine_client
        self._timeout_s = timeout_s
        self._background: set[asyncio.Task[Any]] = set()

    async def call(
        self, op: str, arg: dict[str, Any], *, on_late: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Call one op.

        Args:
            op: its name.
            arg: its argument.
            on_late: called with the reply where it comes after the deadline, to undo what nobody waits for.

        Returns:
            The op's reply.

        Raises:
            Refused: the op's own refusal, or `engine_unavailable` after the deadline or where the engine is dead or
                shutting down.
        """
        call = asyncio.ensure_future(compat.call_control(self._engine_client, op, arg))
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await asyncio.shield(call)
        except TimeoutError as error:
            call.add_done_callback(lambda done: self._late(op, done, on_late))
            msg = f"the engine did not answer {op!r} within {self._timeout_s:g} s; it is busy or stuck, try again"
            raise Refused(msg, code="engine_unavailable", retry_after_s=RETRY_AFTER_S) from error
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._late(op, done, on_late))
            raise
        except Exception as error:
            msg = f"the engine cannot answer {op!r}: {error}; it is dead or shutting down, try another decode node"
            raise Refused(msg, code="engine_unavailable", retry_after_s=RETRY_AFTER_S) from error
        if "error" in reply:
            raise Refused.from_info(ErrorInfo.from_json(reply["error"]))
        return reply

    def call_soon(self, op: str, arg: dict[str, Any]) -> None:
        """Call an op without waiting for it; a failure is logged, the home's own deadlines make up for it."""
        task = asyncio.ensure_future(self.call(op, arg))
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("Call into the engine failed: %s", task.exception())

    @staticmethod
    def _late(op: str, done: asyncio.Future[Any], on_late: Callable[[dict[str, Any]], None] | None) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        logger.warning("The engine answered %r when nobody waited any more.", op)
        if on_late is not None and "error" not in done.result():
            on_late(done.result())
