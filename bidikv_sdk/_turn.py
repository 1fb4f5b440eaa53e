"""The result of one turn. May import `wire` and `_types` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from openai.types.chat import ChatCompletion as OpenAIChatCompletion

    from bidikv_sdk._types import ChatCompletion, Message
    from bidikv_sdk.wire import CacheReport, LeaseInfo, PoolInfo


@dataclass(frozen=True, slots=True)
class Turn:
    """A completed turn: what the model said, and what became of the KV cache."""

    turn: int
    """Number of the turn in its session, from 1."""
    message: Message
    """The assistant's message as the transcript keeps it (empty fields left out)."""
    completion: ChatCompletion = field(repr=False)
    """The reply as JSON; of a stream, what its chunks add up to."""
    lease: LeaseInfo
    """The session's lease when the reply was built."""
    cache: CacheReport
    """Where the prompt's KV cache came from."""
    pool: PoolInfo
    """The block pool of the session's home."""
    reopened: bool
    """True where the server had lost the session, so that this turn opened it again from the full history."""
    raw_headers: Mapping[str, str] = field(repr=False)
    """Headers of the reply, names in lower case."""

    @property
    def text(self) -> str:
        """The assistant's text; empty where there is none, as beside tool calls."""
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls that the model asks for, as OpenAI's objects; empty where there are none."""
        return cast("list[dict[str, Any]]", self.message.get("tool_calls", []))

    @property
    def finish_reason(self) -> str | None:
        """Why the model stopped: `stop`, `length`, `tool_calls`, …."""
        return self.completion["choices"][0]["finish_reason"]

    @property
    def request_id(self) -> str | None:
        """`X-Request-Id` of the reply."""
        return self.raw_headers.get("x-request-id")

    def to_openai(self) -> OpenAIChatCompletion:
        """Return the completion as the openai package's own object.

        Raises:
            ImportError: the openai package is not installed.
        """
        try:
            from openai.types.chat import ChatCompletion as OpenAIChatCompletion  # noqa: PLC0415 - optional
        except ImportError as error:
            msg = "to_openai() needs the openai package (pip install openai); Turn.completion is plain JSON"
            raise ImportError(msg) from error
        # As openai's own client does it: typed all the way down, and lenient about unknown fields.
        return OpenAIChatCompletion.construct(**cast("dict[str, Any]", self.completion))
