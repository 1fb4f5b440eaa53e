"""HTTP clients for everything that is built on the `openai` package: its own defaults, and the current session.

    client = openai.OpenAI(base_url=url, api_key="none", http_client=http_client())
    with current_session("s1"):
        client.chat.completions.create(...)

openai 3 is built on httpx2, openai 2 on httpx; the clients are of the module that the installed one takes. Needs the
extra `openai`, or anything that brings the package. May import the SDK's public names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import openai

from bidikv_sdk import async_session_transport, current_session, session_transport

if TYPE_CHECKING:
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

__all__ = ["async_http_client", "current_session", "http_client"]


def http_client() -> DefaultHttpxClient:
    """Return a client for `openai.OpenAI(http_client=…)` whose completions belong to the current session."""
    return openai.DefaultHttpxClient(transport=session_transport(_module_of(openai.DefaultHttpxClient)))


def async_http_client() -> DefaultAsyncHttpxClient:
    """Return a client for `openai.AsyncOpenAI(http_client=…)` whose completions belong to the current session."""
    return openai.DefaultAsyncHttpxClient(transport=async_session_transport(_module_of(openai.DefaultAsyncHttpxClient)))


def _module_of(kind: type) -> Any:
    """Return the HTTP library that a client's class comes from: httpx or httpx2."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return import_module("httpx2" if "httpx2" in names else "httpx")
