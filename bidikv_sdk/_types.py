"""Types of the JSON that passes through: OpenAI chat messages, completions and stream chunks.

They describe what the server sends today; fields beyond them are kept as they are.
May import the standard library and typing-extensions only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from typing_extensions import NotRequired, TypedDict

Message: TypeAlias = dict[str, Any]
"""An OpenAI chat message."""

Tool: TypeAlias = Mapping[str, Any]
"""An OpenAI tool definition."""

Delta: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What a turn adds: a user's text, one message, or several."""


class Choice(TypedDict):
    """The one choice of a completion."""

    index: int
    message: Message
    finish_reason: str | None
    logprobs: NotRequired[dict[str, Any] | None]


class Usage(TypedDict):
    """Token counts of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, Any] | None]


class ChatCompletion(TypedDict):
    """A `chat.completion`, as the server sent it or as its stream adds up."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage | None]
    bidikv: dict[str, Any]


class ChunkChoice(TypedDict):
    """What a chunk adds to the one choice."""

    index: int
    delta: dict[str, Any]
    finish_reason: NotRequired[str | None]
    logprobs: NotRequired[dict[str, Any] | None]


class ChatCompletionChunk(TypedDict):
    """A `chat.completion.chunk`; the last one of a turn has no choices, but `usage` and `bidikv`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    bidikv: NotRequired[dict[str, Any]]
