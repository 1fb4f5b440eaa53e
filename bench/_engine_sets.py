"""The engines that the arms of a benchmark need: sets that are started once, of which one runs at a time.

A set that does not run is stopped (SIGSTOP), not ended: arms can alternate turn by turn without a start of half a
minute in between, and what does not run takes nothing from what does. May import `launch`.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.launch.command import ROLES
from server_ext.launch.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from bench._plain_engine import PlainEngine
    from server_ext.launch.command import StackConfig


@dataclass(frozen=True)
class EngineSet:
    """Engines that run together."""

    urls: tuple[str, ...]
    """P's and D's, or the one engine's."""
    signal: Callable[[signal.Signals], Any]


class EngineSets:
    """All sets of a run; a context manager that ends them.

    * **configs** - of the pairs, by name.
    * **folder** - for their state and logs.
    * **make_aggregated** - starts the single engine, when its turn comes; None for none.
    """

    def __init__(
        self,
        configs: Mapping[str, StackConfig],
        folder: Path,
        make_aggregated: Callable[[], PlainEngine] | None = None,
    ) -> None:
        self._stacks = {name: Stack(config, folder / name) for name, config in configs.items()}
        self._make_aggregated = make_aggregated
        self._opened = ExitStack()
        self.sets: dict[str, EngineSet] = {}
        self._running = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in self.sets.values():
            one.signal(signal.SIGCONT)  # what stands still cannot end in order
        self._opened.close()

    def run(self, name: str) -> None:
        """Let one set run, and all others stand still."""
        if name == self._running:
            return
        if self._running:
            self.sets[self._running].signal(signal.SIGSTOP)
        self.sets[name].signal(signal.SIGCONT)
        self._running = name

    def _start(self) -> None:
        for name, stack in self._stacks.items():
            self._opened.callback(stack.stop)
            stack.start()
            stack.wait_ready()
            self._add(name, EngineSet((stack.prefill_url, stack.url), _to_both(stack)))
        if self._make_aggregated is not None:
            engine = self._opened.enter_context(self._make_aggregated())
            engine.wait_ready()
            self._add("aggregated", EngineSet((engine.url,), engine.signal))

    def _add(self, name: str, engines: EngineSet) -> None:
        self.sets[name] = engines
        engines.signal(signal.SIGSTOP)


def _to_both(stack: Stack) -> Callable[[signal.Signals], None]:
    def send(sig: signal.Signals) -> None:
        for role in ROLES:
            stack.kill(role, sig)

    return send
