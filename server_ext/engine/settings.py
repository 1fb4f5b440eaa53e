"""bidikv's settings of one engine: `kv_connector_extra_config.bidikv`, checked at start-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx

from server_ext.core.settings import HomeSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

Role = Literal["prefill", "decode"]
_MIN_SECRET_BYTES = 16
# vLLM's own default, which it writes out where it is used.
_KV_LEASE_DURATION_S = 30
_NAMES = (
    "session_id_fields",
    "session_id_headers",
    "parent_id_fields",
    "parent_id_headers",
    "session_final_headers",
)
_OWN_KEYS = frozenset(
    {
        "role",
        "secret_file",
        "prefill_urls",
        "prefill_timeout_s",
        "control_timeout_s",
        "fresh_prefill_salt",
        *_NAMES,
    }
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine needs to know.

    - `role`: `prefill` (P) or `decode` (D).
    - `secret`: shared by all Ps and Ds of a deployment; signs tickets, and whoever holds it may call P.
    - `prefill_urls`: base URLs of the Ps, tried in order (D only).
    - `prefill_timeout_s`: how long D waits for one P, in seconds, before it takes another way; None for the default:
      10 s + twice the time that the prompt takes at the slowest rate seen.
    - `control_timeout_s`: how long an API server waits for its engine core, in seconds.
    - `fresh_prefill_salt`: a debug setting of benchmarks: each request to P gets its own cache salt, so that P's
      prefix cache never hits.
    - `home`: lease and session settings (D only; defaults elsewhere).
    - `kv_lease_duration_s`: vLLM's own setting of this engine, in seconds; P's must not be below D's.
    - `session_id_fields`, `session_id_headers`: where a chat completion may name its session beside vLLM's own places
      (`session_id`, `X-Session-ID`, `vllm_xargs.session_id`), such as `conversation_id` and `X-Correlation-ID`; body
      fields come before headers, each in the given order (D only).
    - `parent_id_fields`, `parent_id_headers`: where it may name the session that its own branches off, beside
      `parent_session_id` and `X-Parent-Session-ID` (D only).
    - `session_final_headers`: of which one that is `true` says that the session ends with this request (D only).
    """

    role: Role
    secret: bytes
    prefill_urls: tuple[str, ...]
    prefill_timeout_s: float | None
    control_timeout_s: float
    fresh_prefill_salt: bool
    home: HomeSettings
    kv_lease_duration_s: int = _KV_LEASE_DURATION_S
    session_id_fields: tuple[str, ...] = ()
    session_id_headers: tuple[str, ...] = ("X-Dynamo-Session-ID",)
    parent_id_fields: tuple[str, ...] = ()
    parent_id_headers: tuple[str, ...] = ("X-Dynamo-Parent-Session-ID",)
    session_final_headers: tuple[str, ...] = ("X-Dynamo-Session-Final",)

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> EngineSettings:
        """Read the settings out of an engine's configuration.

        Raises:
            ValueError: as `from_mapping`; or ours is not the only connector.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_connector == "MultiConnector":
            # Seen by the API server only: a connector within a MultiConnector gets its own part of the configuration.
            msg = (
                "bidikv cannot serve this configuration: kv_connector='MultiConnector': what another connector stores "
                "or loads is no part of a lease; set kv_connector='BidiKVConnector' alone, or take 'bidikv' and "
                "'bidikv_http' out of VLLM_PLUGINS"
            )
            raise ValueError(msg)
        extra = transfer.kv_connector_extra_config or {}
        hold_s = extra.get("kv_lease_duration", _KV_LEASE_DURATION_S)
        return cls.from_mapping(extra.get("bidikv", {}), kv_lease_duration_s=hold_s)

    @classmethod
    def from_mapping(
        cls, config: Mapping[str, Any], *, kv_lease_duration_s: int = _KV_LEASE_DURATION_S
    ) -> EngineSettings:
        """Check and take the settings.

        Args:
            config: the JSON object under `kv_connector_extra_config.bidikv`.
            kv_lease_duration_s: what vLLM itself reads beside it.

        Returns:
            The settings, with the secret read from its file.

        Raises:
            ValueError: names the setting, its value and the fix.
        """
        role = config.get("role")
        if role not in ("prefill", "decode"):
            msg = f"bidikv setting role is {role!r}; set it to 'prefill' or 'decode'"
            raise ValueError(msg)
        urls = config.get("prefill_urls", [])
        if not isinstance(urls, list) or not all(map(_is_base_url, urls)):
            msg = f"bidikv setting prefill_urls is {urls!r}; give a list of base URLs like 'http://10.0.0.1:8000'"
            raise ValueError(msg)
        return cls(
            role=role,
            secret=_read_secret(config.get("secret_file")),
            prefill_urls=tuple(url.rstrip("/") for url in urls),
            prefill_timeout_s=_seconds(config, "prefill_timeout_s", default=None),
            control_timeout_s=_seconds(config, "control_timeout_s", default=30.0) or 30.0,
            fresh_prefill_salt=_flag(config, "fresh_prefill_salt"),
            **{name: _names(config, name) for name in _NAMES if name in config},
            kv_lease_duration_s=kv_lease_duration_s,
            home=HomeSettings.from_config({k: v for k, v in config.items() if k not in _OWN_KEYS}),
        )


def _is_base_url(url: Any) -> bool:
    """Tell whether a path can be put behind it and be called."""
    if not isinstance(url, str) or any(char.isspace() for char in url):
        return False
    try:
        httpx.URL(url)  # what will call it must be able to
        parts = urlsplit(url)
        _ = parts.port  # raises where it is too large, which httpx does not see
    except (ValueError, httpx.InvalidURL):
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and not (parts.query or parts.fragment)


def _read_secret(path: Any) -> bytes:
    if not isinstance(path, str):
        msg = f"bidikv setting secret_file is {path!r}; give the path of a file with the secret that all engines share"
        raise ValueError(msg)  # noqa: TRY004 - one error type for all settings
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        msg = f"bidikv setting secret_file {path!r} cannot be read: {error}"
        raise ValueError(msg) from error
    if len(secret) < _MIN_SECRET_BYTES:
        msg = (
            f"bidikv setting secret_file {path!r} has {len(secret)} bytes; put {_MIN_SECRET_BYTES} random ones or more"
        )
        raise ValueError(msg)
    return secret


def _seconds(config: Mapping[str, Any], name: str, *, default: float | None) -> float | None:
    value = config.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        msg = f"bidikv setting {name} is {value!r}; give a number of seconds above 0"
        raise ValueError(msg)
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        msg = f"bidikv setting {name} is {value!r}; give true or false"
        raise ValueError(msg)  # noqa: TRY004 - one error type for all settings
    return value


def _names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = config[name]
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        msg = f"bidikv setting {name} is {value!r}; give a list of names like 'conversation_id'"
        raise ValueError(msg)
    return tuple(value)
