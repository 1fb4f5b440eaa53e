"""Turns the options of `bidikv up` into a `StackConfig`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from server_ext.launch.command import StackConfig, disabled_plugins
from server_ext.launch.model import SMOLLM2, TOOL_CALL_PARSER, resolve_model
from server_ext.launch.stack import ensure_secret, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GIB = 1 << 30
_PLUGIN_GROUPS = ("general_plugins", "platform_plugins", "io_processor_plugins", "stat_logger_plugins")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for; None is the default of the platform."""

    model: str = SMOLLM2
    platform: Literal["cpu", "gpu"] | None = None
    gpus: str = "0,1"
    gpu_memory: float | None = None
    kv_cache_gib: float | None = None
    max_model_len: int | None = None
    api_keys: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def make_config(options: Options, state_dir: Path, say: Callable[[str], None]) -> StackConfig:
    """A stack on free ports, its model and secret in place.

    Raises:
        ValueError: An option's value; the message names it.
        ModelError: The default model could not be made.
    """
    settings = parse_settings(options.settings)
    gpus = parse_gpus(options.gpus)
    platform = options.platform or ("gpu" if Path("/dev/nvidiactl").exists() else "cpu")
    size_gib = options.kv_cache_gib or (1.0 if platform == "cpu" else None)
    model = resolve_model(options.model, say)
    prefill, decode = free_ports()
    return StackConfig(
        model=model,
        served_name=Path(options.model).name,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(state_dir),
        platform=platform,
        offline=Path(model).is_dir(),
        kv_cache_bytes=None if size_gib is None else int(size_gib * _GIB),
        max_model_len=options.max_model_len,
        tool_call_parser=TOOL_CALL_PARSER if options.model == SMOLLM2 else None,
        gpus=gpus,
        gpu_memory_utilization=options.gpu_memory,
        api_keys=options.api_keys,
        settings=settings,
    )


def parse_gpus(text: str) -> tuple[str, str]:
    """The devices of P and of D.

    Raises:
        ValueError: It is not two of them.
    """
    match [device.strip() for device in text.split(",")]:
        case [str(prefill), str(decode)] if prefill and decode:
            return prefill, decode
    msg = f"--gpus {text!r} is not two devices, for example --gpus 0,1"
    raise ValueError(msg)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`["default_ttl_s=90", "default_route=local"]` as a dictionary; values are JSON, or else plain text.

    Raises:
        ValueError: A setting without `=`.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            msg = f"--set {setting!r} is not NAME=VALUE, for example --set default_ttl_s=90"
            raise ValueError(msg)
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def warn_disabled_plugins(say: Callable[[str], None]) -> None:
    """Say which installed vLLM plugins the engines will not load, because VLLM_PLUGINS was not set."""
    installed = [entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=f"vllm.{group}")]
    if names := ",".join(disabled_plugins(os.environ.get("VLLM_PLUGINS"), installed)):
        say(f"vLLM plugins that will not load: {names}; set VLLM_PLUGINS={names} to load them too")
