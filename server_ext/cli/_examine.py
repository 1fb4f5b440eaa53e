"""Gathers what `bidikv doctor` judges: asks D for its facts and for its view of its Ps, and runs two turns.

`examine` returns `Evidence`; nothing is judged here, and nothing is changed but for one session, which is ended. Talks
over HTTP and through the SDK alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from bidikv_sdk import BidiKV, BidiKVError, CacheReport, SessionInfo
from server_ext.cli._metrics import Metrics, scrape
from server_ext.cli._server import explain, root_of

Refusal = Literal["unreachable", "silent", "wrong_key", "no_plugin", "no_connector", "broken"]

PROBE_PREFIX = "bidikv-doctor-"
_TIMEOUT_S = 20.0
# D's own patience with a P that does not answer is 10 s and more.
_TURN_TIMEOUT_S = 120.0
_PROBE_TTL_S = 30.0
_REPLY_TOKENS = 8
_MIN_PROBE_TOKENS = 128
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Probe:
    """Two turns of one session: the first computed on D alone, the second told to fetch.

    - `error`: why there are no two turns, in words; None where there are.
    """

    second: CacheReport | None = None
    error: str | None = None


@dataclass(slots=True)
class Evidence:
    """What D says, and what it does.

    - `refusal`: why it does not tell its facts, with `detail` in words; None where it does.
    - `engine`: D's facts.
    - `prefill`: what D sees of each P.
    - `metrics`: None where `/metrics` is out of reach.
    - `sessions`, `sessions_error`: the key's sessions, or why they cannot be listed.
    - `probe`: None where no turn was tried.
    """

    base_url: str
    refusal: Refusal | None = None
    detail: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    prefill: list[dict[str, Any]] = field(default_factory=list)
    metrics: Metrics | None = None
    sessions: list[SessionInfo] = field(default_factory=list)
    sessions_error: str | None = None
    probe: Probe | None = None


def examine(base_url: str, api_key: str | None) -> Evidence:
    """Look at a deployment through its D.

    Args:
        base_url: where D's routes begin, `/v1` included.
        api_key: None where D asks for none.
    """
    found = Evidence(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S) as http:
        if not _ask_engine(found, http) or found.engine.get("role") != "decode":
            return found
        try:
            found.prefill = http.get("/bidikv/prefill").raise_for_status().json()["prefill"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            found.detail = f"D did not say what it sees of its prefill engines: {error!r}"
    try:
        found.metrics = scrape(root_of(base_url))
    except httpx.HTTPError:
        found.metrics = None
    with BidiKV(base_url, api_key, timeout=_TURN_TIMEOUT_S, max_retries=0) as client:
        try:
            found.sessions = client.sessions()
        except BidiKVError as error:
            found.sessions_error = explain(error, base_url)
        else:
            found.probe = _run_two_turns(client, found)
    return found


def _ask_engine(found: Evidence, http: httpx.Client) -> bool:
    """Ask D for its facts; say why it has none to tell."""
    try:
        reply = http.get("/bidikv/engine")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        found.refusal, found.detail = "unreachable", str(error)
        return False
    except httpx.HTTPError as error:
        found.refusal, found.detail = "silent", repr(error)
        return False
    try:
        said = reply.json()
        if reply.is_success:
            found.engine = dict(said["engine"])
            return True
    except (ValueError, LookupError, TypeError):
        said = {}
    found.detail = f"HTTP {reply.status_code}"
    if reply.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        found.refusal = "wrong_key"
    elif reply.status_code != httpx.codes.NOT_FOUND:
        found.refusal = "broken"
    elif "code" in (_error_of(said)):
        found.refusal = "no_connector"
    else:
        found.refusal = "no_plugin"
    return False


def _error_of(said: Any) -> dict[str, Any]:
    error = said.get("error") if isinstance(said, dict) else None
    # vLLM's own 404 has a number there.
    return error if isinstance(error, dict) and error.get("code") == "session_not_found" else {}


def _run_two_turns(client: BidiKV, found: Evidence) -> Probe:
    parameters: dict[str, Any] = {"temperature": 0, "max_completion_tokens": _REPLY_TOKENS}
    try:
        with client.session(PROBE_PREFIX + secrets.token_hex(8), ttl_s=_PROBE_TTL_S, **parameters) as session:
            # Not on P, whose own prefix cache would then serve the second turn.
            session.send(_unique_text(_probe_tokens(found.engine)), route="local")
            return Probe(second=session.send("And what comes next?", route="fetch").cache)
    except (BidiKVError, RuntimeError) as error:
        return Probe(error=explain(error, found.base_url))


def _probe_tokens(engine: dict[str, Any]) -> int:
    """Return how long the first turn should be: worth a ticket, and short enough for two turns to fit."""
    settings = engine.get("settings", {})
    wanted = settings.get("min_fetch_tokens", 0) + 2 * engine.get("block_size", 0)
    return int(min(max(wanted, _MIN_PROBE_TOKENS), engine.get("max_model_len", _MIN_PROBE_TOKENS) // 4))


def _unique_text(num_tokens: int) -> str:
    """Return a text of at least so many tokens, and about twice as many at most, that no cache has seen."""
    return f"{secrets.token_hex(8)} " + " ".join(_LETTERS[i % len(_LETTERS)] for i in range(num_tokens))
