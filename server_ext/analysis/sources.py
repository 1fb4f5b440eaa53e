"""Opens logs: files, folders and standard input, gzip or not, as lines of bounded length with their place.

`find_files` first, to know how much there is; then `read_lines` for each. A file that is one JSON document over
many lines comes as a single line.
"""

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from .problems import Problems

SUFFIXES: Final = frozenset({".json", ".jsonl", ".ndjson", ".log", ".txt"})
MAX_LINE_BYTES: Final = 64 << 20
"""More than any prompt; a longer line is not a request."""
_READ_BYTES: Final = 1 << 20


class InputError(ValueError):
    """A path does not exist; the text names it."""


def find_files(paths: list[str], problems: Problems) -> list[Path]:
    """Return the files to read, folders searched to their bottom, in the order of their names.

    Raises:
        InputError: a path does not exist.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            for inner in sorted(p for p in path.rglob("*") if p.is_file()):
                suffixes = [suffix for suffix in inner.suffixes if suffix != ".gz"]
                if suffixes and suffixes[-1] in SUFFIXES:
                    found.append(inner)
                else:
                    problems.add("ignored_file", str(inner))
        elif path.exists():
            found.append(path)
        else:
            msg = f"{path} does not exist: give a log, a folder of logs, or - for standard input"
            raise InputError(msg)
    return found


def read_file(path: Path, problems: Problems, on_bytes: Callable[[int], None]) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, each with its place; report how many bytes of the file have been read."""
    try:
        with path.open("rb") as raw:
            packed: IO[bytes] = gzip.open(raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]  # noqa: SIM115
            last = 0
            for item in read_lines(packed, str(path), problems):
                yield item
                if not raw.seekable():
                    continue  # a pipe has no position
                # A gzip file is told by its own position: that is what there is a total for.
                position = raw.tell()
                if position - last >= _READ_BYTES:
                    on_bytes(position - last)
                    last = position
            if raw.seekable():
                on_bytes(raw.tell() - last)
    except (OSError, EOFError, zlib.error) as error:
        problems.add("unreadable_file", f"{path} ({type(error).__name__})")


def read_lines(stream: IO[bytes], name: str, problems: Problems) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a stream with their places, blank ones left out."""
    number = 0
    first = True
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            problems.add("line_too_long", where)
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
            continue
        # Some editors and exporters begin a file with it, and `cat` puts files behind each other.
        stripped = line.removeprefix(BOM_UTF8).strip()
        if first and stripped in {b"{", b"["}:
            # A document written for people: nothing else begins with a bracket alone.
            line = stripped + stream.read(MAX_LINE_BYTES)
            if stream.read(1):
                problems.add("line_too_long", where)
                return
            stripped = line.strip()
        if stripped:
            first = False
            yield where, stripped
