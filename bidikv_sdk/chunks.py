"""The sum of a stream: chunks of a chat completion, added up to the completion that they are pieces of.

Pure, shared by the SDK (what a stream returns in the end) and the server (what a session keeps of a streamed turn).
May import the standard library and `_types`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_sdk._types import ChatCompletion, ChatCompletionChunk, Message


class ChunkSum:
    """Adds chunks up to the completion that a call without streaming would have returned."""

    def __init__(self) -> None:
        self._message: Message = {"role": "assistant", "content": None}
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._choice: dict[str, Any] = {"index": 0, "message": self._message, "finish_reason": None}
        self._completion: dict[str, Any] = {"object": "chat.completion"}

    @property
    def text(self) -> str:
        """The text so far."""
        return self._message["content"] or ""

    def add(self, chunk: ChatCompletionChunk) -> None:
        """Add one chunk."""
        for name in ("id", "created", "model", "system_fingerprint", "usage", "bidikv"):
            if chunk.get(name) is not None:
                self._completion[name] = chunk.get(name)
        for choice in chunk.get("choices", ()):
            for name, value in choice["delta"].items():
                self._add_field(name, value)
            if (finish_reason := choice.get("finish_reason")) is not None:
                self._choice["finish_reason"] = finish_reason
            for name, items in (choice.get("logprobs") or {}).items():
                self._choice.setdefault("logprobs", {}).setdefault(name, []).extend(items or ())

    def completion(self) -> ChatCompletion:
        """Return what the chunks add up to."""
        if self._tool_calls:
            self._message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        return {**self._completion, "choices": [self._choice]}  # type: ignore[typeddict-item]

    def _add_field(self, name: str, value: Any) -> None:
        if name == "tool_calls":
            for part in value or ():
                self._add_tool_call(part)
        elif isinstance(value, str) and name != "role":
            # `content`, and what else a server streams as text, such as `reasoning`.
            self._message[name] = (self._message.get(name) or "") + value
        elif value is not None:
            self._message[name] = value

    def _add_tool_call(self, part: Mapping[str, Any]) -> None:
        call = self._tool_calls.setdefault(part["index"], {"id": None, "type": "function"})
        call.update({name: part[name] for name in ("id", "type") if part.get(name)})
        function = call.setdefault("function", {"name": "", "arguments": ""})
        for name, piece in part.get("function", {}).items():
            function[name] += piece or ""
