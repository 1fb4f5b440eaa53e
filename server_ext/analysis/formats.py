"""Tells log formats apart, line by line, and hands each line to its parser.

A log may mix formats: every line is looked at by itself. Nothing raises on what a line holds; what cannot be
used is counted in `problems`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from . import openai, traces
from .problems import Problems
from .requests import Request
from .vllm_log import VllmLog, is_vllm_line

Fields: TypeAlias = Mapping[str, msgspec.Raw]

_ANY: Final = json.JSONDecoder()
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE_ERRORS: Final = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
_TEXT_IN_JSON: Final = re.compile(rb'"(?:message|asctime|msg)"')
# A trace has lengths and hashes in place of these.
_PROMPTS: Final = (*openai.PROMPT_NAMES, *openai.FIELDS["body"])

FORMATS: Final = {
    "openai": "OpenAI-style request log",
    "vllm": "vLLM request log",
    "kv-cache-tester": "kv-cache-tester trace",
    "mooncake": "Mooncake trace",
}


def _is_mooncake(fields: Fields) -> bool:
    if "hash_ids" not in fields and not {"input_length", "output_length"} <= fields.keys():
        return False
    return all(bytes(memoryview(fields[name])[:4]) == b"null" for name in _PROMPTS if name in fields)


def _documents(line: bytes) -> Iterator[bytes]:
    """Yield the JSON documents that follow each other in a line.

    Raises:
        ValueError: what follows is none; those before it were yielded.
    """
    text, at = line.decode(errors="surrogateescape"), 0
    while at < len(text):
        end = _ANY.raw_decode(text, at)[1]
        yield text[at:end].encode(errors="surrogateescape")
        at = end


class Parser:
    """Turns lines into requests; `counts` says how many of each format.

    Args:
        problems: where what cannot be used is counted.
    """

    def __init__(self, problems: Problems) -> None:
        self.counts: Counter[str] = Counter()
        self._problems = problems
        self._vllm = VllmLog(problems)

    def parse(self, lines: Iterable[tuple[str, bytes]]) -> Iterator[Request]:
        """Yield the requests of one source; what a log says of a request in several lines is put together."""
        for where, line in lines:
            for place, document in self._split(where, line):
                yield from self._parse_safely(place, document)
        yield from self._counted("vllm", self._vllm.flush())

    def _split(self, where: str, line: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield the documents of a line with their places, so that a bad one does not take the others with it."""
        try:
            if line.startswith(b"["):
                for index, item in enumerate(map(bytes, _LIST.decode(line))):
                    if item.startswith(b"{"):
                        yield f"{where}[{index}]", item
                    else:
                        self._problems.add("malformed_line", f"{where}[{index}]")
            elif line.startswith(b"{") and b"}{" in line:
                # Files without a last newline, put together by `cat`; or just braces in a text.
                for document in _documents(line):
                    yield where, document
            else:
                yield where, line
        except _VALUE_ERRORS:
            self._problems.add("malformed_line", where)

    def _parse_safely(self, where: str, line: bytes) -> Iterator[Request]:
        try:
            yield from self._parse_line(where, line)
        except traces.BlocksError:
            self._problems.add("hash_mismatch", where)
        except _VALUE_ERRORS:
            self._problems.add("malformed_line", where)

    def _parse_line(self, where: str, line: bytes) -> Iterator[Request]:
        if line.startswith(b"{"):
            yield from self._parse_object(where, line)
        elif is_vllm_line(line):
            yield from self._counted("vllm", self._vllm.feed(where, line.decode(errors="replace")))
        else:
            self._problems.add("unknown_format", where)

    def _parse_object(self, where: str, line: bytes) -> Iterator[Request]:
        fields = _OBJECT.decode(line)
        if "requests" in fields and ("block_size" in fields or "hash_id_scope" in fields):
            yield from self._counted("kv-cache-tester", traces.parse_kv_cache_tester(where, line))
        elif _is_mooncake(fields):
            yield from self._counted("mooncake", [traces.parse_mooncake(where, line)])
        elif openai.is_request(fields):
            request = openai.parse(where, fields, self._problems)
            if request is not None:
                yield from self._counted("openai", [request])
        elif _TEXT_IN_JSON.search(line):
            text = openai.text_of_log_record(fields)
            if is_vllm_line(text.encode()):
                yield from self._counted("vllm", self._vllm.feed(where, text))
            else:
                self._problems.add("unknown_format", where)
        else:
            self._problems.add("unknown_format", where)

    def _counted(self, name: str, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            self.counts[name] += 1
            yield request
