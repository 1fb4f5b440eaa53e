"""Judges the evidence of `bidikv doctor`: pure functions from `Evidence` to findings, each with the exact fix.

`judge` calls all of them, in the order in which a deployment is built: D, its plugins and key, its flags, its Ps, its
settings, what it serves, and last the two turns that must hit.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bidikv_sdk.wire import PROTOCOL
from server_ext.cli._examine import PROBE_PREFIX
from server_ext.cli._findings import Finding, failed, passed, warned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_ext.cli._examine import Evidence

_SETTINGS: Final = "kv_connector_extra_config.bidikv"
_START_PLUGINS: Final = "install bidikv-sdk where vLLM runs, and start it with VLLM_PLUGINS=bidikv,bidikv_http"
# A control call waits for the step that runs: on a CPU core this many tokens take about a second.
_MAX_CPU_STEP_TOKENS: Final = 512
# Stock NIXL declines a ticket with 5 s or less left; below twice that a short queue on P is enough.
_TICKET_MARGIN_S, _SHORT_TICKET_S = 5.0, 10.0
_SHORT_TTL_S, _LONG_TTL_S = 10.0, 600.0
_MAX_CLOCK_OFFSET_S: Final = 2.0
_MANY_SESSIONS: Final = 0.5

_REFUSALS: Final = {
    "unreachable": (
        "decode engine",
        "nobody listens there",
        "start it (`bidikv up`), or correct --base-url; one that ended says why in its log (`bidikv logs decode`)",
    ),
    "silent": (
        "decode engine",
        "it accepts connections, but does not answer",
        "look into its log; restart it if it is stuck",
    ),
    "wrong_key": (
        "API key",
        "it does not accept this key",
        "give one of the keys that D was started with: --api-key or BIDIKV_API_KEY",
    ),
    "no_plugin": (
        "extension",
        "it answers, but has no bidikv routes: stock vLLM, or not vLLM",
        _START_PLUGINS + "; or correct --base-url, which ends with /v1",
    ),
    "no_connector": (
        "extension",
        "the plugins are loaded, but the engine has no KV connector",
        "start it with --kv-transfer-config that names BidiKVConnector (server_ext/launch/command.py shows it)",
    ),
    "broken": ("decode engine", "it fails to tell what it is", "look into its log"),
}

_UNSEEN: Final = {
    "unreachable": (
        "D finds nobody there",
        "start it, or correct its place in prefill_urls; D must be able to connect to it",
    ),
    "silent": (
        "it accepts D's connection, but does not answer within 5 s",
        "look into its log; restart it if it is stuck; check that the URL is its HTTP port",
    ),
    "other_secret": (
        "it has another secret than D, so it refuses D's calls and tickets",
        "give both engines the same bytes in secret_file, and restart the one that was wrong",
    ),
    "other_role": (
        "it is a decode engine",
        "put base URLs of prefill engines into prefill_urls, or set role to 'prefill' there",
    ),
    "no_connector": (
        "its plugins are loaded, but it has no KV connector",
        "start it with --kv-transfer-config that names BidiKVConnector, role 'prefill', kv_role 'kv_both'",
    ),
    "no_plugin": ("it has no bidikv routes: stock vLLM, or not vLLM", _START_PLUGINS),
    "refused": (
        "it refuses D's calls: another secret, no plugin, or no connector (its API keys keep D from telling which)",
        "give both engines the same bytes in secret_file; start it with VLLM_PLUGINS=bidikv,bidikv_http",
    ),
}

# What must be equal for a block of one to be valid on the other: fact, in words, fix.
_SAME: Final = (
    ("model", "model configuration", "start both engines with the same --model"),
    ("dtype", "dtype", "start both engines with the same --dtype"),
    ("kv_cache_dtype", "KV cache dtype", "start both engines with the same --kv-cache-dtype"),
    ("block_size", "block size", "start both engines with the same --block-size"),
)
_VERSIONS: Final = (
    ("version", "bidikv", "install the same bidikv-sdk on both"),
    ("protocol", "protocol", "install the same bidikv-sdk on both"),
    ("vllm", "vLLM", "install the same vLLM on both: NIXL refuses to talk to another version"),
)


def judge(found: Evidence, own_version: str) -> list[Finding]:
    """Return all findings; the first ones explain the later ones.

    Args:
        found: the evidence.
        own_version: of the package that this command comes from.
    """
    if found.refusal is not None:
        check, what, fix = _REFUSALS[found.refusal]
        detail = f" ({found.detail})" if found.detail else ""
        return [failed(check, f"{found.base_url}: {what}{detail}", fix)]
    if found.engine.get("role") != "decode":
        text = f"{found.base_url} is a {found.engine.get('role')} engine; sessions live on decode engines"
        return [failed("extension", text, "give --base-url the URL of D, or set its role to 'decode'")]
    return [
        passed("decode engine", f"{found.base_url} answers"),
        passed("extension", "connector and routes are loaded, role decode"),
        *_versions(found, own_version),
        *_core(found),
        *_flags(found.engine),
        *_prefill(found),
        *_settings(found),
        *_keys(found),
        *_metrics(found),
        *_sessions(found),
        *_turns(found),
    ]


def _versions(found: Evidence, own_version: str) -> Iterator[Finding]:
    engine = found.engine
    if engine.get("protocol") != PROTOCOL:
        text = f"D speaks protocol {engine.get('protocol')}, this command {PROTOCOL}"
        yield failed("versions", text, "install the same bidikv-sdk here and on D")
    elif engine.get("version") != own_version:
        text = f"D runs bidikv {engine.get('version')}, this command is {own_version}"
        yield warned("versions", text, "install the same bidikv-sdk here and on D")
    else:
        yield passed("versions", f"bidikv {own_version}, protocol {PROTOCOL}, vLLM {engine.get('vllm')}")


def _core(found: Evidence) -> Iterator[Finding]:
    if found.sessions_error is None:
        yield passed("engine core", "it answers control calls")
        return
    fix = "start D with VLLM_PLUGINS=bidikv,bidikv_http (both) and BidiKVConnector; if it is busy or dead, see its log"
    yield failed("engine core", f"D's HTTP side runs, but: {found.sessions_error}", fix)


def _flags(engine: dict[str, Any]) -> Iterator[Finding]:
    bad: list[Finding] = []
    if not engine.get("prefix_caching"):
        bad.append(failed("flags", "prefix caching is off on D", "start D with --enable-prefix-caching"))
    if engine.get("kv_role") == "kv_producer":
        text = "kv_role is 'kv_producer' on D, which then cannot read what P computed"
        bad.append(failed("flags", text, "set kv_role to 'kv_consumer' in D's --kv-transfer-config"))
    if engine.get("bidirectional_kv_xfer"):
        text = "bidirectional_kv_xfer is on at D: stock NIXL then keeps finished requests' blocks for minutes"
        bad.append(failed("flags", text, "take bidirectional_kv_xfer out of D's kv_connector_extra_config; it is P's"))
    step_tokens = engine.get("max_num_batched_tokens", 0)
    if engine.get("platform") == "cpu" and step_tokens > _MAX_CPU_STEP_TOKENS:
        text = f"D takes steps of up to {step_tokens} tokens, and control calls wait for a step"
        bad.append(warned("flags", text, "start D with --max-num-batched-tokens 256 on CPUs"))
    if not engine.get("prompt_tokens_details"):
        text = "stock routes of D do not tell cached tokens in their usage"
        bad.append(warned("flags", text, "start D with --enable-prompt-tokens-details"))
    if engine.get("appends") is False:
        text = "the chat template rewrites its history: a turn fetches only what lies before the first change"
        bad.append(warned("flags", text, "give D a template that only appends (--chat-template)"))
    yield from bad or [passed("flags", f"D: prefix caching, kv_role {engine.get('kv_role')}, small steps")]


def _prefill(found: Evidence) -> Iterator[Finding]:
    if not found.engine.get("num_prefill_urls"):
        fix = f"set {_SETTINGS}.prefill_urls on D to the base URLs of the prefill engines"
        yield failed("prefill", "D has no prefill_urls, so it computes every prompt itself", fix)
        return
    if not found.prefill:
        yield failed("prefill", found.detail or "D does not say what it sees", "look into D's log")
    for index, one in enumerate(found.prefill):
        check = f"prefill {index}"
        if one.get("state") != "ready":
            what, fix = _UNSEEN.get(one.get("state", ""), (f"its state is {one.get('state')!r}", "look into its log"))
            yield failed(check, f"prefill_urls[{index}]: {what}", fix)
            continue
        bad = [*_misfits(check, found.engine, one["engine"]), *_p_flags(check, found.engine, one)]
        yield from bad or [passed(check, "reachable from D, same secret, model, dtype, block size and versions")]


def _misfits(check: str, decode: dict[str, Any], prefill: dict[str, Any]) -> Iterator[Finding]:
    for name, words, fix in (*_SAME, *_VERSIONS):
        if prefill.get(name) != decode.get(name):
            values = f"{prefill.get(name)} on P, {decode.get(name)} on D"
            yield failed(check, f"another {words}: {values}", fix)
    if prefill.get("max_model_len", 0) < decode.get("max_model_len", 0):
        text = f"P takes prompts up to {prefill.get('max_model_len')} tokens, D up to {decode.get('max_model_len')}"
        yield warned(check, text + "; longer ones are computed on D", "start both with the same --max-model-len")


def _p_flags(check: str, decode: dict[str, Any], one: dict[str, Any]) -> Iterator[Finding]:
    prefill = one["engine"]
    if not prefill.get("bidirectional_kv_xfer"):
        fix = 'set "bidirectional_kv_xfer": true in P\'s kv_connector_extra_config'
        yield failed(check, "bidirectional_kv_xfer is off on P, so it never reads a lease", fix)
    if prefill.get("kv_role") != "kv_both":
        text = f"kv_role is {prefill.get('kv_role')!r} on P, which reads and writes"
        yield failed(check, text, "set kv_role to 'kv_both' in P's --kv-transfer-config")
    threshold = prefill.get("kv_recompute_threshold", 0)
    least = decode.get("settings", {}).get("min_fetch_tokens", 0)
    if threshold > least:
        text = f"P declines to fetch fewer than {threshold} tokens, while D gives tickets from {least} tokens on"
        yield warned(check, text, 'set "kv_recompute_threshold": 0 in P\'s kv_connector_extra_config; D decides')
    offset_s = one.get("clock_offset_s", 0.0)
    if abs(offset_s) > _MAX_CLOCK_OFFSET_S:
        text = f"P's clock is {offset_s:+.1f} s off D's; leases do not mind, but logs cannot be compared"
        yield warned(check, text, "synchronise the clocks (NTP)")


def _settings(found: Evidence) -> Iterator[Finding]:
    settings, engine = found.engine.get("settings", {}), found.engine
    bad = [*_times(settings), *_sizes(settings, engine, found)]
    route = settings.get("default_route")
    if route not in {"fetch", "auto"}:
        text = f"default_route is {route!r}: turns that name no route fetch nothing"
        bad.append(warned("settings", text, f"take {_SETTINGS}.default_route out, or set it to 'fetch'"))
    if settings.get("fresh_prefill_salt"):
        text = "fresh_prefill_salt is on: P's own prefix cache never hits (for benchmarks)"
        bad.append(warned("settings", text, f"take {_SETTINGS}.fresh_prefill_salt out"))
    ttl_s, budget = settings.get("default_ttl_s", 0), settings.get("budget_fraction", 0)
    yield from bad or [passed("settings", f"leases live {ttl_s:g} s and take up to {budget:.0%} of D's blocks")]


def _times(settings: dict[str, Any]) -> Iterator[Finding]:
    ticket_s, ttl_s = settings.get("ticket_ttl_s", 0), settings.get("default_ttl_s", 0)
    fix = f"set {_SETTINGS}.ticket_ttl_s to 60 (the default)"
    if ticket_s <= _TICKET_MARGIN_S:
        text = f"ticket_ttl_s is {ticket_s:g}, and P declines tickets with {_TICKET_MARGIN_S:g} s or less left: all"
        yield failed("settings", text, fix)
    elif ticket_s < _SHORT_TICKET_S:
        text = f"ticket_ttl_s is {ticket_s:g}: a request that waits {ticket_s - _TICKET_MARGIN_S:g} s on P is too late"
        yield warned("settings", text, fix)
    if ttl_s < _SHORT_TTL_S:
        text = f"default_ttl_s is {ttl_s:g}: most leases end before the agent's next turn"
        yield warned("settings", text, f"set {_SETTINGS}.default_ttl_s to 60 (the default)")
    if ttl_s > _LONG_TTL_S:
        text = f"default_ttl_s is {ttl_s:g}: what a crashed agent leaves holds memory that long"
        yield warned("settings", text, "set it to 60 (the default), and hold or extend leases around slow tools")


def _sizes(settings: dict[str, Any], engine: dict[str, Any], found: Evidence) -> Iterator[Finding]:
    max_tokens, least = engine.get("max_model_len", 0), settings.get("min_fetch_tokens", 0)
    if least >= max_tokens:
        text = f"min_fetch_tokens is {least}, and no prompt has more than {max_tokens} tokens: nothing is fetched"
        yield failed("settings", text, f"set {_SETTINGS}.min_fetch_tokens to 64 (the default)")
    if not found.metrics:
        return
    num_blocks = found.metrics.total("bidikv_blocks", state="total")
    share = settings.get("budget_fraction", 1) * settings.get("tenant_share", 1)
    budget_tokens = int(num_blocks * share) * engine.get("block_size", 0)
    fix = f"raise {_SETTINGS}.budget_fraction (or tenant_share), or D's KV cache"
    if budget_tokens < max(least, 2 * engine.get("block_size", 0)):
        yield failed("settings", f"the budget holds {budget_tokens} tokens: no lease is worth fetching", fix)
    elif budget_tokens < max_tokens:
        text = f"the budget of one tenant holds {budget_tokens} tokens, and one history can have {max_tokens}"
        yield warned("settings", text + "; the end of a longer one is computed again", fix)


def _keys(found: Evidence) -> Iterator[Finding]:
    if found.engine.get("has_api_keys"):
        yield passed("tenants", "each API key is a tenant of its own")
    elif _is_loopback(urlsplit(found.base_url).hostname or ""):
        yield passed("tenants", "no API keys: one tenant, fine while only this machine reaches D")
    else:
        text = "no API keys: whoever reaches the port is one tenant, and sees and ends everybody's sessions"
        yield warned("tenants", text, "start D with --api-key (one per tenant), or keep the port private")


def _metrics(found: Evidence) -> Iterator[Finding]:
    if found.metrics is None:
        text = "/metrics cannot be reached beside the session routes"
        yield warned("metrics", text, "scrape D's own port, or let the proxy in front pass /metrics")
    elif not found.metrics:
        yield failed("metrics", "/metrics has no bidikv_ series", "look into D's log for 'metrics'; " + _START_PLUGINS)
    elif found.metrics.total("bidikv_stale_reads_total"):
        text = "bidikv_stale_reads_total is above 0: a read may have seen blocks that were given away"
        yield failed("metrics", text, "raise ticket_grace_s, and report this: it must never happen")
    else:
        yield passed("metrics", "bidikv_ series are served")


def _sessions(found: Evidence) -> Iterator[Finding]:
    if found.sessions_error is not None:
        return
    left = [info.session for info in found.sessions if info.session.startswith(PROBE_PREFIX)]
    num_idle = sum(info.lease.state != "active" for info in found.sessions)
    limit = found.engine.get("settings", {}).get("max_sessions", 0)
    if left:
        text = f"{len(left)} sessions of a doctor that was cut short"
        yield warned("sessions", text, f"bidikv session end {' '.join(left[:3])}")
    elif limit and num_idle > _MANY_SESSIONS * limit:
        text = f"{num_idle} sessions without a lease fill more than half of max_sessions ({limit})"
        yield warned("sessions", text, "let agents end their sessions (`with client.session()`)")
    else:
        yield passed("sessions", f"{len(found.sessions)} of this key, {len(found.sessions) - num_idle} hold a lease")


_TURN_FIXES: Final = {
    "prefill_unavailable": "see the prefill lines above, and D's log for 'is computed on D'",
    "model_changed": "start both engines with the same model, dtype, block size and weights",
    "ticket_late": f"raise {_SETTINGS}.ticket_ttl_s; P declines tickets with 5 s or less left",
    "read_failed": (
        "P cannot read D's memory: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of D must be reachable from P; see P's log"
    ),
    "below_threshold": f"lower {_SETTINGS}.min_fetch_tokens on D, or kv_recompute_threshold on P",
    "over_budget": f"raise {_SETTINGS}.budget_fraction, or D's KV cache",
    "lease_revoked": "D's cache is too small for its load; raise it, or route fewer requests to this D",
    "lease_expired": f"raise {_SETTINGS}.default_ttl_s and max_ttl_s",
    "unsupported": "see the lines above",
}


def _turns(found: Evidence) -> Iterator[Finding]:
    probe = found.probe
    if probe is None:
        return
    if probe.second is None:
        yield failed("two turns", f"they could not be run: {probe.error}", "see the lines above, and D's log")
        return
    report = probe.second
    fetched = f"turn 2 fetched {report.fetched_tokens} of {report.held_tokens} held tokens"
    if report.outcome == "fetched" and report.fetched_tokens >= report.held_tokens > 0:
        took = report.timings_s.ttft
        yield passed("two turns", fetched + (f", first token after {took:.2f} s" if took is not None else ""))
        return
    fix = _TURN_FIXES.get(report.reason, "see the lines above, and both engines' logs")
    yield failed("two turns", f"{fetched}: {report.outcome}, {report.reason}", fix)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
