"""A stock engine by itself: no plugin, no connector. What our stacks are compared with. May import `launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import httpx

from server_ext.launch.command import CPU_ENV
from server_ext.launch.stack import StackError, free_ports
from server_ext.launch.state import EngineRecord, send_signal, stop

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from pathlib import Path

    from typing_extensions import Self

_READY_S: Final = 300.0
_POLL_S: Final = 0.25


class PlainEngine:
    """One stock vLLM engine on this machine's CPU; a context manager that ends it.

    * **model** - its folder.
    * **served_name** - as clients call it.
    * **log_file** - begins anew.
    * **args** - for vLLM, behind those that all our engines have.
    * **env** - to build on; None for this process's own.
    """

    def __init__(
        self,
        model: str,
        served_name: str,
        *,
        log_file: Path,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        port = free_ports()[0].http
        self.url = f"http://127.0.0.1:{port}"
        self._served_name = served_name
        self._log_file = log_file
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--model", model, "--served-model-name", served_name, "--dtype", "float32", "--enforce-eager"]
        argv += ["--distributed-executor-backend", "uni", "--block-size", "32", "--enable-prompt-tokens-details", *args]
        env = dict(os.environ if env is None else env) | {
            **CPU_ENV,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "",
            "HF_HUB_OFFLINE": "1",
        }
        with log_file.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 (an argument list of our own making)
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._record = EngineRecord.of(self._child.pid, role="decode", url=self.url, log_file=log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        stop([self._record])
        self._child.wait()

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._child.pid

    def wait_ready(self) -> None:
        """Return when it has answered a token.

        Raises:
            StackError: it ended, or took too long.
        """
        end_s = time.monotonic() + _READY_S
        with httpx.Client(base_url=self.url, trust_env=False, timeout=_READY_S) as http:
            while time.monotonic() < end_s and self._child.poll() is None:
                with suppress(httpx.TransportError):
                    if http.get("/health", timeout=2.0).is_success:
                        body = {"model": self._served_name, "prompt": "Hello", "max_tokens": 1}
                        http.post("/v1/completions", json=body).raise_for_status()
                        return
                time.sleep(_POLL_S)
        msg = f"the stock engine did not start; its log is {self._log_file}"
        raise StackError(msg)

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        send_signal([self._record], sig)
