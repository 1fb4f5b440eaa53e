"""Groups requests into sessions and makes each a turn: by id, or by prefix where the log has none.

A request without an id continues the session whose last prompt it begins with; failing that, the one with the
same tools, system prompt and first user message; else it begins a session. Of a session only its last prompt is
remembered, as hashes, in an `attic`: memory does not grow with the log.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from .attic import Attic
from .misses import Miss, explain
from .openai import part_fingerprint
from .problems import Problems, printable
from .requests import CHUNK_TOKENS, Kind, Part, Request, Tail, continues, num_shared_chunks, tail_of
from .turns import Turn

MAX_STATE_BYTES: Final = 2 << 20
"""What is remembered in memory, of the sessions that were used last; the others are on disk."""
_MAX_PREFIX_SESSIONS: Final = 20_000
"""Sessions without ids that a request may continue; what they begin with is kept in memory."""
_MAX_FORWARD_S: Final = 7 * 24 * 3600.0
_MAX_CLOCK_S: Final = 1e11  # 3,000 years; floats are exact enough up to there
_MAX_RECENT_IDS: Final = 20_000
_MAX_TOKENS: Final = (1 << 30) - 1
"""Of a prompt, and of an answer: both together are still an int32."""
_MAX_CONTINUED_CHUNKS: Final = 1 << 17
"""Ids that are made for a history: 8 million tokens, more than any context; what a log claims beyond has none."""
_MAX_ALIKE: Final = 64
"""Sessions whose prompts end in the same chunk, that a request is compared with."""
_SESSION_BYTES: Final = 1_500  # objects and dictionary places of an empty one, about
_NUMBERS: Final = re.compile(
    rb"(?:[0-9a-fA-F]{8,}|\d+|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|"
    rb"January|February|March|April|May|June|July|August|September|October|November|December)"
)


@dataclass(slots=True)
class Held:
    """What is remembered of a session: its last turn."""

    number: int
    """Sessions count from 0."""
    turn: int
    model: str
    chunk_ids: "array[int]"
    num_prompt_tokens: int
    num_output_tokens: int
    start_s: float | None
    end_s: float | None
    hashes: list[int]
    kinds: bytearray
    reply: int | None
    ends_in_tool: bool | None
    num_tool_tokens: int
    num_system_tokens: int
    turn_ends: "array[int]"
    """[turns], where each turn's prompt ended, in tokens."""
    system_mask: int
    texts: list[bytes] | None
    """The parts themselves, only where contents are to be shown."""
    tail: Tail
    """What no chunk of the prompt covers."""
    num_bytes: int = 0

    @property
    def has_content(self) -> bool:
        """As `Request.has_content`."""
        return bool(self.chunk_ids or self.hashes or self.tail.num_bytes)

    @property
    def num_context_tokens(self) -> int:
        """Prompt and answer: what a decode engine holds when the turn has ended."""
        return self.num_prompt_tokens + self.num_output_tokens

    def count_bytes(self) -> int:
        """Return what this takes in memory, about."""
        parts = 44 * len(self.hashes) + sum(map(len, self.texts or []))
        return _SESSION_BYTES + 8 * len(self.chunk_ids) + 4 * len(self.turn_ends) + parts


class Sessions:
    """All sessions that are remembered.

    Args:
        problems: where oddities are counted.
        decode_s_per_token: for logs that do not say when an answer ended.
        keep_texts: whether misses are to show contents.
        max_state_bytes: see `MAX_STATE_BYTES`.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        decode_s_per_token: float = 0.02,
        keep_texts: bool = False,
        max_state_bytes: int = MAX_STATE_BYTES,
    ) -> None:
        self.num_sessions = 0
        self.num_by_prefix = 0
        self._problems = problems
        self._decode_s_per_token = decode_s_per_token
        self._keep_texts = keep_texts
        self._held = Attic(max_state_bytes)
        self._prefix_sessions: OrderedDict[str, list[int]] = OrderedDict()
        self._by_prefix: dict[int, list[str]] = {}
        self._recent_ids: OrderedDict[str, None] = OrderedDict()

    def close(self) -> None:
        """Forget all."""
        self._held.close()

    def turns(self, requests: Iterable[Request]) -> Iterator[tuple[str, Turn, Miss | None]]:
        """Yield each request's session id, its turn, and why it repeats less than it could (None: it does not)."""
        for request in requests:
            if self._is_duplicate_id(request):
                continue
            key = printable(self._key(request))
            held = self._held.get(key)
            if held is not None and _is_same(held, request):
                self._problems.add("duplicate_request", request.where)
                continue
            turn, miss = self._next_turn(held, request)
            self._remember(key, held, request, turn)
            if miss is not None:
                miss = replace(miss, session=key, turn=turn.turn, where=printable(miss.where))
            yield key, turn, miss

    # ---------------------------------------------------------------- which session

    def _is_duplicate_id(self, request: Request) -> bool:
        if request.request_id is None:
            return False
        if request.request_id in self._recent_ids:
            self._problems.add("duplicate_request", request.where)
            return True
        self._recent_ids[request.request_id] = None
        if len(self._recent_ids) > _MAX_RECENT_IDS:
            self._recent_ids.popitem(last=False)
        return False

    def _key(self, request: Request) -> str:
        if request.session_id is not None:
            return request.session_id
        key = self._continued_by(request)
        if key is None:
            self.num_by_prefix += 1
            key = f"prefix-{self.num_by_prefix}"
        return key

    def _continued_by(self, request: Request) -> str | None:
        prefix_keys = _part_chain(request.parts) if request.parts else request.chunk_ids
        for index in range(len(prefix_keys) - 1, -1, -1):
            for key in reversed(self._by_prefix.get(prefix_keys[index], ())):
                held = None if request.parts else self._held.get(key)
                if held is None or continues(request, index + 1, held.tail):
                    return key
        root = _root(request.parts)
        # With nothing behind its first message it is a new conversation that begins alike.
        if root is None or (request.parts[-1].kind == Kind.USER and prefix_keys[-1] == root[1]):
            return None
        return next(reversed(self._by_prefix.get(root[0], ())), None)

    # ---------------------------------------------------------------- the turn

    def _next_turn(self, held: Held | None, request: Request) -> tuple[Turn, Miss | None]:
        self._complete(held, request)
        where = request.where
        if request.start_s is None:
            self._problems.add("no_time", where)
        if request.is_estimated:
            self._problems.add("estimated_tokens", where)
        if request.num_prompt_tokens and not (request.has_content or request.is_delta):
            self._problems.add("no_content", where)
        turn = Turn(
            session=self.num_sessions,
            turn=1,
            model=request.model,
            start_s=request.start_s,
            end_s=request.end_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            cached_tokens=request.num_cached_tokens,
            ttft_s=request.ttft_s,
            ends_in_tool=request.ends_in_tool,
        )
        if held is None:
            self.num_sessions += 1
            return turn, None
        shared, is_reply_kept = _shared_tokens(held, request) if request.model == held.model else (0, False)
        miss = explain(held, request, shared, is_reply_kept=is_reply_kept)
        if miss is not None and miss.cause == "system_edited" and held.system_mask == _system_mask(request.parts):
            miss = replace(miss, cause="system_numbers") if held.system_mask else miss
        turn.session, turn.turn = held.number, held.turn + 1
        turn.shared_tokens = shared
        turn.repeated_tokens = min(turn.shared_tokens, held.num_prompt_tokens)
        turn.held_before = held.num_context_tokens
        turn.prompt_before = held.num_prompt_tokens
        turn.after_tool = held.ends_in_tool
        turn.gap_s = self._gap_s(held, request)
        return turn, miss

    def _complete(self, held: Held | None, request: Request) -> None:
        """Fill in what a log leaves to be worked out: deltas, delays, ends."""
        if request.is_delta and held is not None:
            request.chunk_ids = _continued(held, request)
            request.num_prompt_tokens += held.num_context_tokens
        # A log may claim any number, and deltas add up.
        request.num_prompt_tokens = min(max(request.num_prompt_tokens, 0), _MAX_TOKENS)
        request.num_output_tokens = min(max(request.num_output_tokens, 0), _MAX_TOKENS)
        if request.start_s is None and request.delay_s is not None:
            before_s = held.end_s if held is not None and held.end_s is not None else 0.0
            request.start_s = before_s + request.delay_s
        elif request.start_s is None and request.is_delta:
            request.start_s = 0.0
        request.start_s = self._possible(request.start_s, -_MAX_CLOCK_S, _MAX_CLOCK_S, request.where)
        last_s = _MAX_CLOCK_S if request.start_s is None else request.start_s + _MAX_FORWARD_S
        request.end_s = self._possible(request.end_s, -_MAX_CLOCK_S, last_s, request.where)
        request.ttft_s = self._possible(request.ttft_s, 0.0, _MAX_FORWARD_S, request.where)
        if request.end_s is not None and request.start_s is not None and request.end_s < request.start_s:
            request.end_s = None
        if request.end_s is None and request.start_s is not None:
            self._problems.add("estimated_end", request.where)
            request.end_s = request.start_s + request.num_output_tokens * self._decode_s_per_token

    def _possible(self, time_s: float | None, least_s: float, most_s: float, where: str) -> float | None:
        """Return a time as it is; None where no clock can have shown it, or where it is no number."""
        if time_s is None or least_s <= time_s <= most_s:
            return time_s
        self._problems.add("impossible_time", where)
        return None

    def _gap_s(self, held: Held, request: Request) -> float | None:
        if held.start_s is None or held.end_s is None or request.start_s is None:
            return None
        if request.start_s < held.start_s:
            self._problems.add("clock_backwards", request.where)
            return None
        if request.start_s > held.end_s + _MAX_FORWARD_S:
            self._problems.add("clock_forwards", request.where)
            return None
        if request.start_s < held.end_s:
            self._problems.add("overlapping_turn", request.where)
            return 0.0
        return request.start_s - held.end_s

    # ---------------------------------------------------------------- memory

    def _remember(self, key: str, held: Held | None, request: Request, turn: Turn) -> None:
        ends = held.turn_ends if held is not None else array("i")
        ends.append(request.num_prompt_tokens)
        parts = request.parts
        new = Held(
            number=turn.session,
            turn=turn.turn,
            model=request.model,
            chunk_ids=request.chunk_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            start_s=request.start_s,
            end_s=request.end_s,
            hashes=[part.hash for part in parts],
            kinds=bytearray(part.kind for part in parts),
            reply=request.reply,
            ends_in_tool=request.ends_in_tool,
            num_tool_tokens=request.num_tool_tokens,
            num_system_tokens=request.num_system_tokens,
            turn_ends=ends,
            system_mask=_system_mask(parts),
            texts=[part.raw for part in parts] if self._keep_texts else None,
            tail=tail_of(request),
        )
        if request.session_id is None:
            self._index(key, request)
        new.num_bytes = new.count_bytes()
        self._held.put(key, new)

    def _index(self, key: str, request: Request) -> None:
        """Let requests without ids find a session: by its last prompt, and by how it began."""
        self._unindex(key)
        parts, root = request.parts, _root(request.parts)
        prefix_keys = [*(_part_chain(parts) if parts else request.chunk_ids)[-1:]]
        prefix_keys += [root[0]] if root is not None else []
        self._prefix_sessions[key] = prefix_keys
        for prefix_key in prefix_keys:
            alike = self._by_prefix.setdefault(prefix_key, [])
            alike.append(key)
            del alike[:-_MAX_ALIKE]
        if len(self._prefix_sessions) > _MAX_PREFIX_SESSIONS:
            self._unindex(next(iter(self._prefix_sessions)))
            self._problems.add("forgotten_session", request.where)

    def _unindex(self, key: str) -> None:
        for prefix_key in self._prefix_sessions.pop(key, ()):
            alike = self._by_prefix.get(prefix_key, [])
            if key in alike:
                alike.remove(key)
            if not alike:
                self._by_prefix.pop(prefix_key, None)


def _is_same(held: Held, request: Request) -> bool:
    return (
        request.start_s is not None
        and held.start_s == request.start_s
        and held.num_prompt_tokens == request.num_prompt_tokens
        and not request.is_delta
        and held.chunk_ids == request.chunk_ids
        and held.tail == tail_of(request)
        and held.hashes == [part.hash for part in request.parts]
    )


def _shared_tokens(held: Held, request: Request) -> tuple[int, bool]:
    """Return how many tokens of the session's context the prompt repeats, and whether the answer is among them."""
    if request.is_delta:
        return min(held.num_context_tokens, request.num_prompt_tokens), True
    num_chunks = num_shared_chunks(held.chunk_ids, request.chunk_ids)
    is_whole = num_chunks == len(held.chunk_ids) and request.num_prompt_tokens >= held.num_prompt_tokens
    if is_whole and request.parts and held.hashes:
        num_parts = len(held.hashes)
        is_whole = held.hashes == [part.hash for part in request.parts[:num_parts]]
    elif is_whole:
        # Two prompts of which nothing is told have no chunks in common either.
        is_whole = held.has_content and continues(request, num_chunks, held.tail)
    if not is_whole:
        shared = int(num_chunks * request.tokens_per_chunk)
        return min(shared, held.num_prompt_tokens, request.num_prompt_tokens), False
    is_kept = _is_reply_kept(held, request)
    shared = held.num_context_tokens if is_kept else held.num_prompt_tokens
    return min(shared, request.num_prompt_tokens), is_kept


def _is_reply_kept(held: Held, request: Request) -> bool:
    """Tell whether the prompt goes on with the answer as it was given; by room alone where it is not logged."""
    if request.parts and held.hashes:
        if len(request.parts) <= len(held.hashes):
            return False
        answer = request.parts[len(held.hashes)]
        if answer.kind == Kind.ASSISTANT:
            return held.reply is None or held.reply == part_fingerprint(answer)
        return answer.kind == Kind.OTHER
    return request.num_prompt_tokens >= held.num_context_tokens


def _continued(held: Held, request: Request) -> "array[int]":
    """Return the chunk ids of a history and what a delta adds to it."""
    ids = array("q", held.chunk_ids)
    last = ids[-1] if ids else held.number
    num_chunks = (held.num_context_tokens + request.num_prompt_tokens) // CHUNK_TOKENS
    num_chunks = min(num_chunks, _MAX_CONTINUED_CHUNKS)
    while len(ids) < num_chunks:
        last = hash((last, held.turn, len(ids)))
        ids.append(last)
    return ids


def _part_chain(parts: list[Part]) -> list[int]:
    """Return, for each part, a number for all parts up to it."""
    last = 0
    return [last := hash((last, part.hash)) for part in parts]


def _root(parts: list[Part]) -> tuple[int, int] | None:
    """Return what tells a conversation from others, all up to its first user message: as a key, and as a chain."""
    at = next((i for i, part in enumerate(parts) if part.kind == Kind.USER), None)
    if at is None:
        return None
    chained = _part_chain(parts[: at + 1])[-1]
    return hash(("root", chained)), chained


def _system_mask(parts: list[Part]) -> int:
    """Return a hash of the system prompt without its numbers and dates; 0 where there is none."""
    system = b"".join(part.raw for part in parts if part.kind == Kind.SYSTEM)
    return hash(_NUMBERS.sub(b"#", system)) if system else 0
