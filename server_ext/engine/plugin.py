"""What vLLM loads in every process (`vllm.general_plugins`): the control method, and a NIXL that lets a CPU rest."""

from __future__ import annotations

import os

# Long enough that an idle engine costs under 2 % of a core, short enough to be lost in a transfer's own time.
NIXL_PAUSE_US = 500


def register() -> None:
    """Install the engine core's control method. Called once in every vLLM process.

    Raises:
        RuntimeError: this vLLM is not supported.
    """
    # Imported here, because vLLM loads plugins by entry point before it knows what a process will be.
    from server_ext.engine import compat, control

    compat.require_supported_version()
    compat.install_control(control.dispatch)
    if compat.is_cpu_platform():
        compat.pause_nixl_progress_thread(int(os.environ.get("BIDIKV_NIXL_PAUSE_US", NIXL_PAUSE_US)))
