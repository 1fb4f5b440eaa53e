"""A test's end of the copies that engines make of their KV caches (`copying` is the other)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from server_ext.launch.command import ROLES

from .common import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from server_ext.launch.command import Role


@dataclass
class Copy:
    """What one request left in an engine's memory: its tokens, and [layer, key or value, token, head, dimension]."""

    token_ids: list[int]
    kv: np.ndarray


class Copies:
    """Where the copies of one stack lie."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        for role in ROLES:
            (folder / role).mkdir(parents=True, exist_ok=True)

    def forget(self) -> None:
        """Drop what was copied so far."""
        for role in ROLES:
            for file in (self.path / role).glob("*.npz"):
                file.unlink()

    def take(self, role: Role, prompt_ids: Sequence[int]) -> Copy:
        """Return the copy of the one request with this prompt, and forget it."""
        return eventually(lambda: self._find(role, list(prompt_ids)), f"a copy of a request on the {role} engine")

    def _find(self, role: Role, prompt_ids: list[int]) -> Copy | None:
        for file in (self.path / role).glob("*.npz"):
            with np.load(file) as data:
                ids = data["token_ids"].tolist()
                if ids[: len(prompt_ids)] == prompt_ids:
                    copy = Copy(ids, data["kv"])
                    file.unlink()
                    return copy
        return None


def farthest(a: Copy, b: Copy) -> float:
    """Return the greatest difference of any key or value over the tokens that both hold; they must be the same."""
    num_tokens = min(len(a.token_ids), len(b.token_ids))
    assert a.token_ids[:num_tokens] == b.token_ids[:num_tokens]
    return float(np.abs(a.kv[:, :, :num_tokens] - b.kv[:, :, :num_tokens]).max())
