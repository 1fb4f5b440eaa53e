"""Counts what was wrong with the input, by name, with where it was seen first. Nothing here stops a run."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

PROBLEMS: Final[dict[str, str]] = {
    "malformed_line": "not JSON, or of the wrong shape; skipped",
    "line_too_long": "longer than 64 MiB; skipped",
    "unknown_format": "JSON or text of no known log format; skipped",
    "other_log_line": "a text log's line that tells neither a prompt nor an answer; skipped",
    "unreadable_file": "could not be opened or decompressed; skipped",
    "ignored_file": "not a log by its name (.json, .jsonl, .ndjson, .log, .txt, also .gz); skipped",
    "hash_mismatch": "has block hashes that fit its length at no usual block size: give its block_size; skipped",
    "no_prompt": "names a request but tells neither its prompt nor its length; skipped",
    "no_content": "tells no text, ids or full block hashes of its prompt; taken to repeat nothing",
    "several_prompts": "asks for completions of a list of prompts at once; skipped",
    "bad_count": "a token count below 0, above 2**29, above its prompt's or no number; taken as not told",
    "unknown_unit": "a latency, duration or ttft too long for seconds, its name without a unit; taken as not told",
    "no_time": "has no time; left out of gaps and of the replay",
    "impossible_time": "has a time beyond 3,000 years, or lasts more than a week; that time is taken as not told",
    "duplicate_request": "the same request once more; skipped",
    "clock_backwards": "starts before the turn before it; its gap is not counted",
    "clock_forwards": "starts more than a week after the turn before it; its gap is not counted",
    "overlapping_turn": "starts before the turn before it has ended; the replay ends that one early",
    "forgotten_session": "without an id, and 20,000 others were used since; a later turn counts as a first one",
    "over_context": "longer than the model's context: another --model?",
    "estimated_tokens": "gives no token counts: taken as 4 bytes a token",
    "estimated_end": "gives no end: taken as its output at the model's speed",
}
"""Every name, and what it means and does."""


def printable(text: str) -> str:
    """Return a text that can be written anywhere: names of files need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(slots=True)
class Problems:
    """Counts by name of `PROBLEMS`."""

    counts: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)
    """Where: `file:line`."""

    def add(self, name: str, where: str) -> None:
        """Count one more."""
        self.counts[name] += 1
        if name not in self.first_seen:
            self.first_seen[name] = printable(where)

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per name, the most frequent first."""
        return [
            {"name": name, "count": count, "meaning": PROBLEMS[name], "first_seen": self.first_seen[name]}
            for name, count in self.counts.most_common()
        ]
