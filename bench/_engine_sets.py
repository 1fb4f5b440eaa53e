"""The engines that the arms of a benchmark need: sets that are started once, of which one runs at a time.

A set that does not run is stopped (SIGSTOP), not ended: arms can alternate turn by turn without a start of half a
minute in between, and what does not run takes nothing from what does. May import `launch`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from server_ext.launch.command import ROLES
from server_ext.launch.stack import Stack, StackError
from server_ext.launch.state import EngineRecord, send_signal, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from server_ext.launch.command import StackConfig

_READY_S = 300.0
_POLL_S = 0.5


class AggregatedEngine:
    """One stock engine that prefills and decodes, with prefix caching, on all cores that a pair has.

    * **model** - its folder.
    * **served_name** - as clients call it.
    * **port** - of HTTP, on this machine.
    * **log_file** - begins anew.
    * **extra_args** - for vLLM.
    """

    def __init__(
        self,
        model: str,
        served_name: str,
        *,
        port: int,
        log_file: Path,
        kv_cache_bytes: int,
        extra_args: tuple[str, ...],
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log_file = log_file
        self._child: subprocess.Popen[bytes] | None = None
        self._record: EngineRecord | None = None
        self._served_name = served_name
        self._argv = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", served_name, "--host", "127.0.0.1", "--port", str(port)),
            *("--enable-prompt-tokens-details", "--kv-cache-memory-bytes", str(kv_cache_bytes), "--block-size", "32"),
            *("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"),
            *("--max-num-batched-tokens", "512", *extra_args),
        ]

    def start(self) -> None:
        """Start it and return at once."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(len(ROLES)),  # a pair has a core for each engine
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": "",
        }
        with self._log_file.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 (our own arguments)
                self._argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._record = EngineRecord.of(self._child.pid, role="decode", url=self.url, log_file=self._log_file)

    def wait_ready(self) -> None:
        """Return when it has answered a token.

        Raises:
            StackError: it ended, or took too long.
        """
        assert self._child is not None, "start first"  # noqa: S101 (order of calls)
        deadline_s = time.monotonic() + _READY_S
        with httpx.Client(base_url=self.url, trust_env=False, timeout=_READY_S) as http:
            while time.monotonic() < deadline_s and self._child.poll() is None:
                try:
                    if http.get("/health", timeout=2.0).is_success:
                        body = {"model": self._served_name, "prompt": "Hello", "max_tokens": 1}
                        http.post("/v1/completions", json=body).raise_for_status()
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_POLL_S)
        msg = f"the aggregated engine did not start; see {self._log_file}"
        raise StackError(msg)

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        if self._record is not None:
            send_signal([self._record], sig)

    def stop(self) -> None:
        """End it."""
        if self._record is not None and self._child is not None:
            stop([self._record])
            self._child.wait()


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
    * **aggregated** - the single engine; None for none.
    """

    def __init__(
        self, configs: Mapping[str, StackConfig], folder: Path, aggregated: AggregatedEngine | None = None
    ) -> None:
        self._stacks = {name: Stack(config, folder / name) for name, config in configs.items()}
        self._aggregated = aggregated
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
        if self._aggregated is not None:
            self._opened.callback(self._aggregated.stop)
            self._aggregated.start()
            self._aggregated.wait_ready()
            self._add("aggregated", EngineSet((self._aggregated.url,), self._aggregated.signal))

    def _add(self, name: str, engines: EngineSet) -> None:
        self.sets[name] = engines
        engines.signal(signal.SIGSTOP)


def _to_both(stack: Stack) -> Callable[[signal.Signals], None]:
    def send(sig: signal.Signals) -> None:
        for role in ROLES:
            stack.kill(role, sig)

    return send
