"""The rows that the questions are asked of: one small record per turn, spooled to disk while the log is read."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from os import SEEK_END
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[Any]
"""[num_turns] of `ROW`."""

ROW: Final = np.dtype(
    [
        ("session", "i4"),
        ("turn", "i4"),
        ("model", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("gap_s", "f8"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("shared", "i4"),
        ("repeated", "i4"),
        ("held", "i4"),
        ("before", "i4"),
        ("cached", "i4"),
        ("ttft_s", "f4"),
        ("after", "i1"),
        ("ends", "i1"),
    ]
)
"""Seconds are NaN, and `cached` is -1, where the log does not tell. `after` and `ends` say how the turn before and
this one ended: with a tool call (1), without (0), or unknown (-1)."""
_BATCH: Final = 4096
_NAN: Final = float("nan")


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request as a turn of its session."""

    session: int
    turn: int
    """From 1."""
    model: str
    start_s: float | None
    end_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ttft_s: float | None
    shared_tokens: int = 0
    """Of the prompt, that the session held before it: the last prompt's and its answer's."""
    repeated_tokens: int = 0
    """Of these, those of the last prompt."""
    held_before: int = 0
    """Tokens of the last prompt and its answer."""
    prompt_before: int = 0
    after_tool: bool | None = None
    """Whether the turn before ended with a tool call."""
    ends_in_tool: bool | None = None
    gap_s: float | None = None
    """From the end of the turn before to this one's start."""


class Spool:
    """Rows on disk, in a temporary file that ends with the object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the spool)
        self._batch: list[tuple[Any, ...]] = []
        self._models: dict[str, int] = {}
        self.num_rows = 0

    def close(self) -> None:
        """Give the file back; rows that were returned stay readable."""
        self._file.close()

    def append(self, turn: Turn) -> None:
        """Add a turn."""
        model = self._models.setdefault(turn.model, len(self._models))
        self._batch.append(
            (
                turn.session,
                turn.turn,
                model,
                _NAN if turn.start_s is None else turn.start_s,
                _NAN if turn.end_s is None else turn.end_s,
                _NAN if turn.gap_s is None else turn.gap_s,
                turn.prompt_tokens,
                turn.output_tokens,
                turn.shared_tokens,
                turn.repeated_tokens,
                turn.held_before,
                turn.prompt_before,
                -1 if turn.cached_tokens is None else turn.cached_tokens,
                _NAN if turn.ttft_s is None else turn.ttft_s,
                -1 if turn.after_tool is None else turn.after_tool,
                -1 if turn.ends_in_tool is None else turn.ends_in_tool,
            )
        )
        self.num_rows += 1
        if len(self._batch) == _BATCH:
            self._flush()

    def sample(self, max_rows: int) -> Rows:
        """Return every n-th row, in the order of the log, so that they are at most `max_rows`."""
        stride = max(1, -(-self.num_rows // max_rows))
        # A batch begins where the stride of the whole file has come to.
        parts = [batch[-start % stride :: stride] for start, batch in self._batches()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=ROW)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column [num_rows], in the order of the log."""
        parts = [batch[name].copy() for _, batch in self._batches()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=ROW[name])

    def pick(self, indices: npt.NDArray[np.intp]) -> Rows:
        """Return the rows at `indices`, in their order."""
        picked = np.zeros(len(indices), dtype=ROW)
        for start, batch in self._batches():
            here = np.flatnonzero((indices >= start) & (indices < start + len(batch)))
            picked[here] = batch[indices[here] - start]
        return picked

    def _batches(self) -> Iterator[tuple[int, Rows]]:
        """Iterate the rows some at a time, each with the index of its first: never all of them in memory."""
        self._flush()
        self._file.seek(0)
        for start in range(0, self.num_rows, _BATCH):
            num_rows = min(_BATCH, self.num_rows - start)
            yield start, np.frombuffer(self._file.read(num_rows * ROW.itemsize), dtype=ROW)

    def _flush(self) -> None:
        if self._batch:
            self._file.seek(0, SEEK_END)
            self._file.write(np.array(self._batch, dtype=ROW).tobytes())
            self._batch.clear()


class Names:
    """Session names on disk, by number."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (as above)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def append(self, name: str) -> None:
        """Add the name of the next session."""
        self._file.write(name.replace("\n", " ").encode(errors="replace") + b"\n")

    def find(self, numbers: list[int]) -> dict[int, str]:
        """Return the names of these sessions."""
        wanted = set(numbers)
        self._file.seek(0)
        return {n: line.decode()[:-1] for n, line in enumerate(self._file) if n in wanted}
