"""Which session a stock client's request belongs to: where its ids may stand, in body and headers. Pure.

vLLM's own places come first, in vLLM's order; then the names that the settings give, fields before headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.http.turn_request import is_session_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from server_ext.engine.settings import EngineSettings

_HEADER = "X-Session-ID"
_PARENT_FIELD = "parent_session_id"
_PARENT_HEADER = "X-Parent-Session-ID"


@dataclass(frozen=True, slots=True)
class Named:
    """What a request says of its session.

    - `session_id`: as the client chose it.
    - `parent_id`: the session that this one branches off; None where none is named.
    - `is_final`: the session's cache is not needed behind this request.
    """

    session_id: str
    parent_id: str | None = None
    is_final: bool = False


def named_in(body: Mapping[str, Any], headers: Mapping[str, str], settings: EngineSettings) -> Named | None:
    """Return what a request says of its session.

    Args:
        body: the JSON object.
        headers: of the request, by names of any case.
        settings: have the aliases.

    Returns:
        None where there is no id that can be one.
    """
    extra = body.get("vllm_xargs")
    session_id = _first(
        (
            body.get("session_id"),
            headers.get(_HEADER),
            extra.get("session_id") if isinstance(extra, dict) else None,
            *(body.get(name) for name in settings.session_id_fields),
            *(headers.get(name) for name in settings.session_id_headers),
        )
    )
    if session_id is None:
        return None
    parent_id = _first(
        (
            body.get(_PARENT_FIELD),
            headers.get(_PARENT_HEADER),
            *(body.get(name) for name in settings.parent_id_fields),
            *(headers.get(name) for name in settings.parent_id_headers),
        )
    )
    is_final = any(headers.get(name, "").strip().lower() == "true" for name in settings.session_final_headers)
    return Named(session_id, parent_id, is_final)


def _first(names: Iterable[Any]) -> str | None:
    named = next((name for name in names if name), None)
    return named if is_session_id(named) else None
