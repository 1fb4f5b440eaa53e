"""What `bidikv doctor` says: one finding per line, with the fix. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    - `check`: what was looked at; the same words for every outcome.
    - `text`: what was found.
    - `fix`: what to do; empty where there is nothing to do.
    """

    status: Status
    check: str
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as an object."""
        return asdict(self)


def passed(check: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding("PASS", check, text)


def warned(check: str, text: str, fix: str) -> Finding:
    """It works, but not as well, or as safely, as it could."""
    return Finding("WARN", check, text, fix)


def failed(check: str, text: str, fix: str) -> Finding:
    """Turns fail, or nothing is ever fetched."""
    return Finding("FAIL", check, text, fix)
