"""The control channel's far end: one method of the engine core, on the scheduler's thread, between steps."""

from __future__ import annotations

from typing import Any


def dispatch(connector: Any, op: str, arg: dict[str, Any]) -> dict[str, Any]:
    """Hand a control call to the connector.

    Args:
        connector: the scheduler's KV connector, or None where the engine has none.
        op: one of the ops of `core.home.Home`.
        arg: the op's argument, plain values only.

    Returns:
        The op's reply; `{"error": {...}}` for a refusal, also where this engine has no such connector.
    """
    control = getattr(connector, "control", None)
    if control is None:
        msg = (
            f"this engine runs {type(connector).__name__}, which keeps no leases; start it with "
            "kv_connector='BidiKVConnector' and kv_connector_module_path='server_ext.engine.connector'"
        )
        return {"error": {"code": "engine_unavailable", "message": msg}}
    reply: dict[str, Any] = control(op, arg)
    return reply
