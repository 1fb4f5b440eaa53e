"""A session that is known by its id and its server alone: to hold it, to give its cache back. Makes no call itself.

May import the SDK's modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from bidikv_sdk._clock import Clock
from bidikv_sdk._current import CurrentSession, Server, current_session

if TYPE_CHECKING:
    from bidikv_sdk.wire import Route


def known_session(
    session_id: str,
    server: Server,
    *,
    parent_id: str | None = None,
    route: Route | None = None,
    ttl_s: float | None = None,
) -> CurrentSession:
    """Return a session whose verbs reach a server.

    Raises:
        ValueError: an id cannot travel in a header, or the route is none.
    """
    session = current_session(session_id, parent=parent_id, route=route, ttl_s=ttl_s)
    session.sent_to(server)
    return session


def server_at(base_url: str, api_key: str | None) -> Server:
    """Return the server at `base_url`, which ends in /v1."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return Server(httpx, None, base_url.rstrip("/"), headers, Clock())
