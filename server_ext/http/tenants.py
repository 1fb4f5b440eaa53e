"""Who is calling: a tenant is an API key. vLLM's own middleware has checked the key; here it is only named."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SINGLE_TENANT = ""


class Tenants:
    """Names tenants by their keys, without keeping the keys.

    Without API keys there is one tenant, and everybody who reaches the port is it.
    """

    def __init__(self, secret: bytes, *, has_keys: bool) -> None:
        self._secret = secret
        self._has_keys = has_keys

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of a request that vLLM has let through."""
        if not self._has_keys:
            return SINGLE_TENANT
        # Taken apart as vLLM's own check does, or one key would be as many tenants as "bearer" has spellings.
        _, _, key = headers.get("authorization", "").partition(" ")
        return self._digest("tenant", key)

    def cache_salt(self, tenant: str, *, session_id: str | None = None) -> str | None:
        """Return the salt of a tenant's prefix cache, from the key and never from the body.

        Args:
            tenant: as returned by `tenant_of`.
            session_id: makes a salt of this session alone, for turns that must not share anything.

        Returns:
            The salt; None for the single tenant, which shares the cache with vLLM's other routes.
        """
        if session_id is not None:
            return self._digest("session", f"{tenant}/{session_id}")
        return self._digest("salt", tenant) if tenant else None

    def _digest(self, purpose: str, value: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{value}".encode(), hashlib.sha256).hexdigest()[:32]
