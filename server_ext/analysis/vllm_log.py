"""Parses vLLM's own request log (`--enable-log-requests`, prompts at `--log-level DEBUG`), old forms too.

vLLM tells a request in several lines: its prompt, that it was received, and what was generated. They are put
together by request id; what is still open at the end comes from `flush`. The log has no session ids.
"""

import ast
import re
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Final

from .problems import Problems
from .requests import BYTES_PER_TOKEN, Request, chain_bytes, pack_ids

# More requests than one engine runs or queues; older ones are given out without their end.
_MAX_OPEN: Final = 4096

_MARK: Final = re.compile(rb"(?:Received request|Generated response|Request) \S+?(?: details)?:?")
_LEVEL: Final = re.compile(rb"\b(?:DEBUG|INFO|WARNING|ERROR)\b")
_TIME: Final = re.compile(r"(?:(\d{4})-)?(\d{2})-(\d{2})[ T](\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,6}))?")
_RECEIVED: Final = re.compile(r"Received request (?P<id>\S+?): (?P<rest>.*)", re.DOTALL)
_DETAILS: Final = re.compile(r"Request (?P<id>\S+) details: (?P<rest>.*)", re.DOTALL)
_OUTPUT: Final = re.compile(
    r"Generated response (?P<id>\S+?)(?P<kind> \(streaming (?:delta|complete)\))?: (?P<rest>.*)", re.DOTALL
)
_PROMPT: Final = re.compile(r"prompt: (?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", re.DOTALL)
_IDS: Final = re.compile(r"(?:prompt|output)_token_ids: \[(?P<ids>[\d, ]*)\]")


def is_vllm_line(line: bytes) -> bool:
    """Return whether a line may be of a vLLM log: it names a level, or speaks of a request."""
    return _LEVEL.search(line, 0, 200) is not None or _MARK.search(line, 0, 400) is not None


class VllmLog:
    """The requests of a log that are not told to their end yet."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._open: OrderedDict[str, Request] = OrderedDict()

    def feed(self, where: str, line: str) -> Iterator[Request]:
        """Take a line; yield the request that it completes, if any.

        Raises:
            ValueError, OverflowError: its prompt is malformed; the line counts as if it was not there.
        """
        if (match := _DETAILS.search(line)) is not None or (match := _RECEIVED.search(line)) is not None:
            request_id = match["id"]
            if (request := self._open.get(request_id)) is None:
                request = Request(where=where, request_id=request_id, start_s=_time_s(line))
            self._read_prompt(request, match["rest"])
            self._open[request_id] = request
        elif (match := _OUTPUT.search(line)) is None:
            self._problems.add("other_log_line", where)
        elif "delta" not in (match["kind"] or ""):
            yield from self._end(match["id"], line, match["rest"])
        while len(self._open) > _MAX_OPEN:
            yield from self._give_out(self._open.popitem(last=False)[1])

    def flush(self) -> Iterator[Request]:
        """Yield what is still open: requests whose answers are not logged, as is vLLM's default."""
        while self._open:
            yield from self._give_out(self._open.popitem(last=False)[1])

    def _read_prompt(self, request: Request, rest: str) -> None:
        ids = _IDS.search(rest)
        if ids is not None and ids["ids"].strip():
            token_ids = [int(token_id) for token_id in ids["ids"].split(",")]
            request.data = pack_ids(token_ids)
            request.chunk_ids = chain_bytes(request.data)
            request.num_prompt_tokens = len(token_ids)
            return
        text = _PROMPT.search(rest)
        if text is not None and not request.num_prompt_tokens:
            request.data = _unquote(text["text"]).encode(errors="replace")
            request.chunk_ids = chain_bytes(request.data)
            request.num_prompt_tokens = len(request.data) // BYTES_PER_TOKEN
            request.is_estimated = True

    def _end(self, request_id: str, line: str, rest: str) -> Iterator[Request]:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        request.end_s = _time_s(line)
        if (ids := _IDS.search(rest)) is not None:
            request.num_output_tokens = ids["ids"].count(",") + bool(ids["ids"].strip())
        yield from self._give_out(request)

    def _give_out(self, request: Request) -> Iterator[Request]:
        if request.num_prompt_tokens:
            yield request
        else:
            self._problems.add("no_prompt", request.where)


def _unquote(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, MemoryError):
        # Not with its own text: that quotes the prompt.
        msg = "a prompt is not quoted as Python does it"
        raise ValueError(msg) from None


def _time_s(line: str) -> float | None:
    match = _TIME.search(line)
    if match is None:
        return None
    year, *parts, fraction = match.groups()
    # vLLM writes no year. Only differences count, and a leap year has all days.
    try:
        when = datetime(int(year or 2000), *map(int, parts), tzinfo=timezone.utc)  # type: ignore[misc,arg-type]
    except ValueError:
        return None
    return when.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
