"""What a fake server says: completions, and chunks that say the same, in the shape of vLLM's. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bidikv_sdk._types import Message
    from bidikv_sdk.wire import Outcome, Reason

# Fields of vLLM's completions that say nothing here.
_UNSET: Final = (
    "service_tier",
    "system_fingerprint",
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """What a turn shall answer; None: what the server says by itself."""

    text: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    outcome: Outcome | None = None
    reason: Reason | None = None
    reasoning: str | None = None


def text_of(message: Message) -> str:
    """Return a message's text, of content parts too."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def count_tokens(messages: Sequence[Message]) -> int:
    """Return the tokens of messages: a word is one, and so is a role."""
    return sum(len(f"{message.get('role')} {text_of(message)}".split()) for message in messages)


def completion_of(
    completion_id: str,
    model: str,
    delta: Sequence[Message],
    script: ScriptedReply,
    prompt_tokens: int,
    cached_tokens: int | None,
) -> dict[str, Any]:
    """Return a completion without its report; unless the script says another thing it echoes the last message.

    `cached_tokens` is None where no session serves it.
    """
    echo = None if script.tool_calls else text_of(delta[-1])
    message: Message = {
        "role": "assistant",
        "content": echo if script.text is None else script.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": script.reasoning,
    }
    if script.tool_calls:
        message["tool_calls"] = [dict(call) for call in script.tool_calls]
    finish_reason = script.finish_reason or ("tool_calls" if script.tool_calls else "stop")
    num_new = count_tokens([message])
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{**choice, "stop_reason": None, "token_ids": None, "routed_experts": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": prompt_tokens + num_new,
            "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
            "completion_tokens_details": None,
        },
        **dict.fromkeys(_UNSET),
    }


def chunks_of(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield chunks that say the same as the completion: text by words, tool-call arguments in two pieces."""
    choice = completion["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = []
    for name in ("reasoning", "content"):
        deltas += [{name: word} for word in (message[name] or "").replace(" ", "\0 ").split("\0") if word]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        head = {**call, "index": index, "function": {**call["function"], "arguments": arguments[:half]}}
        rest = {"index": index, "function": {"arguments": arguments[half:]}}
        deltas += [{"tool_calls": [head]}, {"tool_calls": [rest]}]
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield {**_chunk(completion, [first]), "prompt_token_ids": None, "prompt_text": None}
    said = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None}
    for delta in deltas:
        yield _chunk(completion, [{**said, "delta": delta}])
    last = {**said, "delta": {}, "finish_reason": choice["finish_reason"], "stop_reason": None}
    yield _chunk(completion, [last])


def whole_chunk_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return one chunk with the whole message, as the stored reply of a repeated turn is streamed."""
    choice = completion["choices"][0]
    calls = [{**call, "index": index} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    said = {name: value for name, value in choice["message"].items() if value or name in {"role", "content"}}
    delta = {**said, **({"tool_calls": calls} if calls else {})}
    return _chunk(completion, [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}])


def last_chunk_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunk that ends a turn: no choices, but `usage` and, within a session, `bidikv`."""
    report = {"bidikv": completion["bidikv"]} if "bidikv" in completion else {}
    usage = {name: value for name, value in completion["usage"].items() if value is not None}
    chunk = _chunk(completion, [])
    return {**chunk, "usage": usage, "system_fingerprint": completion["system_fingerprint"], **report}


def _chunk(completion: Mapping[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    head = {name: completion[name] for name in ("id", "created", "model")}
    return {**head, "object": "chat.completion.chunk", "choices": choices}
