"""Explains a cache miss: where a prompt stops repeating what its session held, how much that costs, and why.

`explain` compares what is remembered of a session's last turn with its next request. Contents are compared by
hash; they are part of a miss only where the caller kept them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .requests import CHUNK_TOKENS, Kind

if TYPE_CHECKING:
    from bidikv_sdk.wire import Reason

    from .requests import Request
    from .sessions import Held

# A prompt below this part of what was there before is a summary of it, not an edit.
_COMPACTED_SHARE: Final = 0.8
_EXCERPT: Final = 60


@dataclass(frozen=True, slots=True)
class Cause:
    """A kind of miss."""

    reason: "Reason"
    """The server's word for it (`docs/http.md`)."""
    meaning: str
    fix: str


CAUSES: Final[dict[str, Cause]] = {
    "model_switched": Cause(
        "model_changed",
        "another model (or adapter) answered this turn",
        "give each model a session of its own: KV of one is of no use to another",
    ),
    "tools_reordered": Cause(
        "tools_changed",
        "the same tools in another order",
        "send the tools in a fixed order: sort them by name once, also after a reload",
    ),
    "tools_added_or_removed": Cause(
        "tools_changed",
        "tools were added or removed in the middle of the session",
        "declare all tools in the first turn, and refuse calls instead of removing the tool",
    ),
    "tool_edited": Cause(
        "tools_changed",
        "a tool's definition changed, or its JSON is written in another key order",
        "build the definitions once per session; keep dates, paths and ids out of descriptions",
    ),
    "system_numbers": Cause(
        "system_changed",
        "only numbers differ in the system prompt: a date, a time, a counter, an id",
        "move what changes from the system prompt to the end of the last user message",
    ),
    "system_edited": Cause(
        "system_changed",
        "the system prompt's text changed",
        "keep the system prompt as it is for a whole session; say what is new in a later message",
    ),
    "compacted": Cause(
        "messages_changed",
        "the history was replaced by a shorter one (compaction, or a new conversation under the old id)",
        "compact rarely and at once; after it, the next turn is like a first one",
    ),
    "messages_dropped": Cause(
        "messages_changed",
        "old messages were dropped in front of kept ones (a sliding window)",
        "drop in large steps, not one message a turn: every drop loses all that follows",
    ),
    "message_inserted": Cause(
        "messages_changed",
        "a message was inserted before old ones",
        "append: put reminders and retrieved text behind the history, not into it",
    ),
    "reply_rewritten": Cause(
        "messages_changed",
        "the assistant's own message came back changed (reasoning stripped, text trimmed, JSON rewritten)",
        "send replies back as they came, or let the server keep them (bidikv sessions do)",
    ),
    "tool_result_rewritten": Cause(
        "messages_changed",
        "an old tool result was shortened or cleared",
        "shorten results before they are sent the first time",
    ),
    "message_edited": Cause(
        "messages_changed",
        "an old message changed",
        "append a correction instead of editing; edits lose all that follows",
    ),
}
"""Every cause, by name."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A turn that repeats less than its session held."""

    cause: str
    """A name of `CAUSES`."""
    region: str
    """The first that differs: `tools`, `system`, `message 7`, or `history of turn 3` where messages are unknown."""
    at_token: int
    """Where the prompt stops repeating."""
    lost_tokens: int
    """Held, but of no use: what follows the difference."""
    where: str
    old_hash: str | None = None
    new_hash: str | None = None
    old_content: str | None = None
    new_content: str | None = None
    session: str = ""
    turn: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the miss with its cause's meaning and fix; contents only where they were kept."""
        cause = CAUSES[self.cause]
        data = {name: getattr(self, name) for name in self.__slots__ if "content" not in name}
        if self.old_content is not None or self.new_content is not None:
            data |= {"old_content": self.old_content, "new_content": self.new_content}
        return {**data, "reason": cause.reason, "meaning": cause.meaning, "fix": cause.fix}


def explain(held: "Held", request: "Request", shared_tokens: int, *, is_reply_kept: bool) -> Miss | None:
    """Return why `request` repeats less than what `held` has; None where it repeats all.

    Args:
        held: the session's last turn.
        request: its next one.
        shared_tokens: how far they agree.
        is_reply_kept: whether the answer stands in the new prompt as it was given.
    """
    lost = held.num_context_tokens - shared_tokens
    if lost <= 0:
        return None
    if request.model != held.model:
        return Miss("model_switched", "model", 0, held.num_context_tokens, request.where)
    if not (held.has_content and request.has_content):
        return None  # it may repeat all or nothing: such a log does not tell
    if held.hashes and request.parts:
        return _explain_parts(held, request, shared_tokens, lost, is_reply_kept=is_reply_kept)
    if lost < CHUNK_TOKENS + held.num_output_tokens:
        return None  # a rest that no chunk covers; whether the answer is kept, such a log does not tell
    return _explain_position(held, request, shared_tokens, lost)


def _explain_parts(
    held: "Held", request: "Request", shared_tokens: int, lost: int, *, is_reply_kept: bool
) -> Miss | None:
    new_hashes = [part.hash for part in request.parts]
    new_kinds = [part.kind for part in request.parts]
    at = next((i for i, (a, b) in enumerate(zip(held.hashes, new_hashes, strict=False)) if a != b), None)
    if at is None:
        at = min(len(held.hashes), len(new_hashes))
    if at == len(new_hashes):
        return None  # a retry, or a step back: all of the new prompt is there
    if at == len(held.hashes):
        if is_reply_kept or not held.num_output_tokens:
            return None
        cause, region = "reply_rewritten", _region(new_kinds, at)
    else:
        cause = _cause_at(held, new_kinds, new_hashes, at, request.num_prompt_tokens)
        region = _region(held.kinds, at)
    old_text = held.texts[at] if held.texts and at < len(held.texts) else None
    new_text = request.parts[at].raw if held.texts else None
    old_excerpt, new_excerpt = _excerpts(old_text, new_text)
    return Miss(
        cause,
        region,
        shared_tokens,
        lost,
        request.where,
        f"{held.hashes[at]:016x}" if at < len(held.hashes) else None,
        f"{new_hashes[at]:016x}",
        old_excerpt,
        new_excerpt,
    )


def _cause_at(held: "Held", new_kinds: list[Kind], new_hashes: list[int], at: int, num_prompt_tokens: int) -> str:
    kind = Kind(held.kinds[at])
    new_kind = new_kinds[at]
    if Kind.TOOL_DEF in {kind, new_kind}:
        return _tools_cause(held, new_kinds, new_hashes)
    if kind == Kind.SYSTEM and new_kind == Kind.SYSTEM:
        return "system_edited"  # the session knows more: see `refine_system`
    is_shorter = len(new_hashes) < len(held.hashes)
    if is_shorter and num_prompt_tokens < _COMPACTED_SHARE * held.num_prompt_tokens:
        # Fewer messages that are all old ones is a window that moved, however much it left out.
        return "messages_dropped" if new_hashes[at] in held.hashes[at + 1 :] else "compacted"
    if new_hashes[at] in held.hashes[at + 1 :]:
        return "messages_dropped"
    if held.hashes[at] in new_hashes[at + 1 :]:
        return "message_inserted"
    return {Kind.ASSISTANT: "reply_rewritten", Kind.TOOL: "tool_result_rewritten"}.get(kind, "message_edited")


def _tools_cause(held: "Held", new_kinds: list[Kind], new_hashes: list[int]) -> str:
    old = Counter(h for h, kind in zip(held.hashes, held.kinds, strict=True) if kind == Kind.TOOL_DEF)
    new = Counter(h for h, kind in zip(new_hashes, new_kinds, strict=True) if kind == Kind.TOOL_DEF)
    if old == new:
        return "tools_reordered"
    return "tool_edited" if old.total() == new.total() else "tools_added_or_removed"


def _region(kinds: "bytearray | list[Kind]", at: int) -> str:
    if at >= len(kinds):
        return f"message {at - sum(kind == Kind.TOOL_DEF for kind in kinds)}"
    if kinds[at] == Kind.TOOL_DEF:
        return f"tools[{at}]"
    if kinds[at] == Kind.SYSTEM:
        return "system"
    return f"message {at - sum(kind == Kind.TOOL_DEF for kind in kinds)}"


def _explain_position(held: "Held", request: "Request", shared_tokens: int, lost: int) -> Miss:
    """Explain where only ids or hashes are known: by where it is, and by what each turn had added."""
    cause = "message_edited"
    if shared_tokens < held.num_tool_tokens - CHUNK_TOKENS:
        cause, region = "tool_edited", "tools"
    elif shared_tokens < held.num_tool_tokens + held.num_system_tokens - CHUNK_TOKENS:
        cause, region = "system_edited", "system"
    else:
        turn = next((i for i, end in enumerate(held.turn_ends, 1) if shared_tokens < end), len(held.turn_ends))
        region = f"history of turn {turn}"
        if request.num_prompt_tokens < _COMPACTED_SHARE * held.num_prompt_tokens:
            cause = "compacted"
    return Miss(cause, region, shared_tokens, lost, request.where)


def _excerpts(old: bytes | None, new: bytes | None) -> tuple[str | None, str | None]:
    """Return what stands around the first difference."""
    a, b = old or b"", new or b""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, at - _EXCERPT // 2)
    cut = [None if text is None else text[start : at + _EXCERPT].decode(errors="replace") for text in (old, new)]
    return cut[0], cut[1]
