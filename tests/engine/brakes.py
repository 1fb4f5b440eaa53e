"""A test's end of the brakes on the engines (`braked` is the other): hold a point, wait until it is reached, let go."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from .common import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Brake:
    """One point, held until `let_go`."""

    def __init__(self, folder: Path, point: str) -> None:
        self._point = point
        self._hold = folder / f"{point}.hold"
        self._reached = folder / f"{point}.reached"
        self._reached.unlink(missing_ok=True)
        self._hold.write_text("hold")

    def wait(self) -> None:
        """Return when an engine is there."""
        eventually(self._reached.exists, f"an engine at {self._point}")

    def crawl(self) -> None:
        """Let the engine go on slowly, a tenth of a second at each passage."""
        self._hold.write_text("crawl")

    def let_go(self) -> None:
        """Let the engine go on."""
        self._hold.unlink(missing_ok=True)


class BrakeFolder:
    """Where the brakes of one stack lie."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self, point: str) -> Iterator[Brake]:
        """Hold a point (`<role>-<point>`) for the length of a block."""
        brake = Brake(self.path, point)
        try:
            yield brake
        finally:
            brake.let_go()

    def finished(self, role: str) -> list[str]:
        """Return how requests of one engine have ended, since the last `forget`."""
        try:
            lines = (self.path / f"{role}.finished").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.split()[1] for line in lines]

    def forget(self) -> None:
        """Begin anew: let everything go, and forget what was written down."""
        for file in self.path.iterdir():
            file.unlink()
