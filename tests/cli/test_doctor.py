"""`bidikv doctor` finds what is planted, and names the fix; a healthy deployment passes line by line."""

import json

import pytest
from typer.testing import CliRunner

from server_ext.cli._app import app
from server_ext.cli._server import with_version_path
from server_ext.launch.stack import default_state_dir
from server_ext.launch.state import EngineRecord, StackState, write_state

from .deployment import METRICS, Deployment, facts, serving

CHECKS = [
    "decode engine",
    "extension",
    "versions",
    "engine core",
    "flags",
    "prefill 0",
    "settings",
    "tenants",
    "metrics",
    "sessions",
    "two turns",
]


def diagnose(url, *argv):
    """Return the exit code and the findings that are no PASS, as (status, check, text, fix)."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--base-url", url, *argv])
    told = json.loads(result.stdout)
    assert told["ok"] == (result.exit_code == 0)
    bad = [one for one in told["findings"] if one["status"] != "PASS"]
    return result.exit_code, [(one["status"], one["check"], one["text"], one["fix"]) for one in bad]


def decode(**changes):
    """Plant facts of D."""
    return lambda deployment: deployment.engine.update(changes)


def setting(**changes):
    """Plant settings of D."""
    return lambda deployment: deployment.engine["settings"].update(changes)


def prefill(**changes):
    """Plant facts of P."""
    return lambda deployment: deployment.prefill[0]["engine"].update(changes)


def both(**changes):
    """Plant facts of both engines, which then differ from this command's."""

    def plant(deployment):
        decode(**changes)(deployment)
        prefill(**changes)(deployment)

    return plant


def seen(state):
    """Plant what D sees of P, which then serves no turn."""

    def plant(deployment):
        deployment.prefill = [{"state": state}]
        deployment.server.reply(outcome="recomputed", reason="forced")
        deployment.server.reply(outcome="recomputed", reason="prefill_unavailable")

    return plant


def turn_2(outcome, reason):
    """Plant the outcome of the second turn."""

    def plant(deployment):
        deployment.server.reply()
        deployment.server.reply(outcome=outcome, reason=reason)

    return plant


def answer(status, body, path="/v1/bidikv/engine"):
    """Plant a reply of another server."""
    return lambda deployment: setattr(
        deployment, "raw", lambda method, asked: (status, body) if asked.startswith(path) else None
    )


def clock_off(deployment):
    """Plant a P whose clock is ahead."""
    deployment.prefill[0]["clock_offset_s"] = 30.0


def no_key(deployment):
    """Plant a D that wants a key which the caller does not have."""
    deployment.api_key = "right"


def no_metrics(text):
    """Plant other metrics."""
    return lambda deployment: setattr(deployment, "metrics", text)


def leftover(deployment):
    """Plant a session of a doctor that was killed."""
    with deployment.server.client() as client:
        client.session("bidikv-doctor-1").send("hi")


STALE = METRICS.replace("stale_reads_total 0", "stale_reads_total 1")
NO_PLUGIN = answer(404, {"detail": "Not Found"}, "/v1")
NO_CONNECTOR = answer(404, {"error": {"message": "no connector", "code": "session_not_found"}})
CORE_GONE = answer(503, {"error": {"message": "it cannot answer 'list'", "code": "engine_unavailable"}}, "/v1/sessions")

PLANTED = {
    # D itself
    "no extension on D": (NO_PLUGIN, "FAIL", "extension", "no bidikv routes", "VLLM_PLUGINS=bidikv,bidikv_http"),
    "no connector on D": (NO_CONNECTOR, "FAIL", "extension", "no KV connector", "--kv-transfer-config"),
    "wrong API key": (no_key, "FAIL", "API key", "does not accept this key", "--api-key or BIDIKV_API_KEY"),
    "D fails": (answer(500, {}), "FAIL", "decode engine", "fails to tell", "log"),
    "URL of P": (decode(role="prefill"), "FAIL", "extension", "is a prefill engine", "URL of D"),
    "engine core without plugin": (CORE_GONE, "FAIL", "engine core", "cannot answer", "VLLM_PLUGINS=bidikv,bidikv"),
    "other protocol": (both(protocol=2), "FAIL", "versions", "protocol 2", "same bidikv-sdk"),
    "other version here": (both(version="9.9"), "WARN", "versions", "bidikv 9.9", "same bidikv-sdk"),
    "prefix caching off": (decode(prefix_caching=False), "FAIL", "flags", "prefix caching", "--enable-prefix-caching"),
    "producer on D": (decode(kv_role="kv_producer"), "FAIL", "flags", "'kv_producer' on D", "kv_consumer"),
    "D bidirectional": (decode(bidirectional_kv_xfer=True), "FAIL", "flags", "for minutes", "take bidirectional"),
    "large steps": (decode(max_num_batched_tokens=8192), "WARN", "flags", "8192", "--max-num-batched-tokens 256"),
    "no details": (decode(prompt_tokens_details=False), "WARN", "flags", "cached", "--enable-prompt-tokens-details"),
    "rewriting template": (decode(appends=False), "WARN", "flags", "rewrites its history", "--chat-template"),
    # P
    "no prefill_urls": (decode(num_prefill_urls=0), "FAIL", "prefill", "no prefill_urls", "prefill_urls on D"),
    "P down": (seen("unreachable"), "FAIL", "prefill 0", "finds nobody", "start it"),
    "P stuck": (seen("silent"), "FAIL", "prefill 0", "does not answer within 5 s", "restart it"),
    "other secret on P": (seen("other_secret"), "FAIL", "prefill 0", "another secret", "same bytes in secret_file"),
    "D in place of P": (seen("other_role"), "FAIL", "prefill 0", "is a decode engine", "role to 'prefill'"),
    "no plugin on P": (seen("no_plugin"), "FAIL", "prefill 0", "no bidikv routes", "VLLM_PLUGINS=bidikv,bidikv_http"),
    "no connector on P": (seen("no_connector"), "FAIL", "prefill 0", "no KV connector", "BidiKVConnector"),
    "P refuses": (seen("refused"), "FAIL", "prefill 0", "keep D from telling", "secret_file"),
    "other model": (prefill(model="f" * 16), "FAIL", "prefill 0", "another model", "same --model"),
    "other dtype": (prefill(dtype="bfloat16"), "FAIL", "prefill 0", "bfloat16 on P, float32 on D", "same --dtype"),
    "other cache dtype": (prefill(kv_cache_dtype="fp8"), "FAIL", "prefill 0", "fp8 on P", "--kv-cache-dtype"),
    "other block size": (prefill(block_size=64), "FAIL", "prefill 0", "64 on P, 16 on D", "same --block-size"),
    "other bidikv on P": (prefill(version="0.0.1"), "FAIL", "prefill 0", "0.0.1 on P", "same bidikv-sdk"),
    "other vLLM on P": (prefill(vllm="0.32.9"), "FAIL", "prefill 0", "0.32.9 on P", "same vLLM"),
    "P never reads": (
        prefill(bidirectional_kv_xfer=False), "FAIL", "prefill 0", "never reads", '"bidirectional_kv_xfer": true',
    ),
    "P only produces": (prefill(kv_role="kv_producer"), "FAIL", "prefill 0", "'kv_producer' on P", "'kv_both'"),
    "P's threshold": (prefill(kv_recompute_threshold=512), "WARN", "prefill 0", "512", '"kv_recompute_threshold": 0'),
    "P takes less": (prefill(max_model_len=1024), "WARN", "prefill 0", "up to 1024", "same --max-model-len"),
    "clocks apart": (clock_off, "WARN", "prefill 0", "+30.0 s", "NTP"),
    # Settings
    "tickets always late": (setting(ticket_ttl_s=4.0), "FAIL", "settings", "ticket_ttl_s is 4", "ticket_ttl_s to 60"),
    "tickets often late": (setting(ticket_ttl_s=8.0), "WARN", "settings", "waits 3 s on P", "ticket_ttl_s to 60"),
    "short leases": (setting(default_ttl_s=2.0), "WARN", "settings", "default_ttl_s is 2", "default_ttl_s to 60"),
    "long leases": (setting(default_ttl_s=900.0), "WARN", "settings", "default_ttl_s is 900", "hold or extend"),
    "nothing is worth it": (setting(min_fetch_tokens=5000), "FAIL", "settings", "5000", "min_fetch_tokens to 64"),
    "no budget": (setting(budget_fraction=0.001), "FAIL", "settings", "budget holds 16", "budget_fraction"),
    "small budget": (setting(budget_fraction=0.1), "WARN", "settings", "holds 1632 tokens", "budget_fraction"),
    "other default": (setting(default_route="recompute"), "WARN", "settings", "fetch nothing", "to 'fetch'"),
    "left from a benchmark": (setting(fresh_prefill_salt=True), "WARN", "settings", "never hits", "fresh_prefill"),
    # What it serves
    "metrics out of reach": (no_metrics(None), "WARN", "metrics", "cannot be reached", "D's own port"),
    "no metrics of ours": (no_metrics("vllm:x 1\n"), "FAIL", "metrics", "no bidikv_ series", "log"),
    "a stale read": (no_metrics(STALE), "FAIL", "metrics", "above 0", "grace"),
    "a killed doctor": (leftover, "WARN", "sessions", "cut short", "bidikv session end bidikv-doctor-1"),
    # Two turns
    "reads fail": (turn_2("recomputed", "read_failed"), "FAIL", "two turns", "read_failed", "SIDE_CHANNEL_HOST"),
    "late": (turn_2("recomputed", "ticket_late"), "FAIL", "two turns", "ticket_late", "ticket_ttl_s"),
    "below the threshold": (turn_2("recomputed", "below_threshold"), "FAIL", "two turns", "below", "min_fetch_tokens"),
    "P knows it already": (turn_2("prefilled", "forced"), "FAIL", "two turns", "fetched 0 of", "logs"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_fix_named(deployment, name):
    """The line says what is wrong and what to do; it fails the command, a warning where --strict asks for that."""
    plant, status, check, text, fix = PLANTED[name]
    plant(deployment)
    code, bad = diagnose(deployment.url, "--strict")
    assert code == 1
    assert [one for one in bad if one[:2] == (status, check) and text in one[2] and fix in one[3]], bad
    if status == "WARN":
        assert diagnose(deployment.url)[0] == 0
    # Nothing else is blamed, but for the turns, which show the effect.
    assert {one[1] for one in bad} <= {check, "two turns"}


def test_a_healthy_deployment_passes(deployment):
    """Every check has a line, and all of them pass; the doctor leaves no session behind."""
    result = CliRunner().invoke(app, ["doctor", "--strict", "--base-url", deployment.url])
    assert result.exit_code == 0, result.stdout
    lines = [line.split(":")[0].split("  ") for line in result.stdout.splitlines()]
    assert lines == [["PASS", check] for check in CHECKS]
    assert [request.verb for request in deployment.server.requests] == ["list", "turns", "turns", "end"]


def test_the_two_turns_are_a_lease_and_a_forced_fetch(deployment):
    """The first turn is computed on D alone, so that P's own cache cannot stand in; its text is new each time."""
    texts = set()
    for _ in range(2):
        deployment.server.requests.clear()
        assert diagnose(deployment.url) == (0, [])
        first, second = (one.body for one in deployment.server.requests if one.verb == "turns")
        assert (first["bidikv"]["route"], second["bidikv"]["route"]) == ("local", "fetch")
        texts.add(first["messages"][0]["content"])
    assert len(texts) == 2


def test_two_turns_that_cannot_be_run(deployment):
    """An error of a turn is a finding with the server's words, and the session is ended all the same."""
    deployment.server.fail("engine_unavailable", "the engine is dead", on="turns")
    _, bad = diagnose(deployment.url)
    assert [(one[0], one[1]) for one in bad] == [("FAIL", "two turns")]
    assert "the engine is dead" in bad[0][2]
    assert deployment.server.requests[-1].verb == "end"


def test_a_key_is_used_for_everything(deployment):
    """With the right key all passes, and D's tenants are told apart."""
    deployment.api_key = "right"
    deployment.engine["has_api_keys"] = True
    assert diagnose(deployment.url, "--api-key", "right") == (0, [])


def test_a_fix_is_printed_below_its_line(deployment):
    """What to do stands under what is wrong, for people."""
    deployment.engine["prefix_caching"] = False
    result = CliRunner().invoke(app, ["doctor", "--base-url", deployment.url])
    assert "FAIL  flags: prefix caching is off on D\n      fix: start D with" in result.stdout


def test_nobody_listens(deployment):
    """The first line says so; nothing else is guessed."""
    with serving(Deployment()) as gone:
        url = gone.url
    code, bad = diagnose(url)
    assert code == 1
    assert [(one[0], one[1]) for one in bad] == [("FAIL", "decode engine")]
    assert "bidikv up" in bad[0][3]


def test_a_local_stack_that_did_not_start_is_explained_by_its_log(invoke):
    """What an engine refused at start-up is in its log, with the fix; the doctor repeats it."""
    default_state_dir().mkdir(parents=True)
    refusal = "bidikv cannot serve this configuration: prefix caching is off, so D cannot; enable it"
    (default_state_dir() / "decode.log").write_text(f"INFO fine\n(EngineCore) ValueError: {refusal}\nINFO end\n")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert f"FAIL  decode engine: it refused to start: {refusal}" in result.stdout
    assert "FAIL  decode engine: no stack of this user runs" in result.stdout


def test_a_local_stack_whose_prefill_engine_is_gone(deployment, invoke):
    """Without an address the local stack is meant: P's log is read where D finds nobody in its place."""
    seen("unreachable")(deployment)
    records = [EngineRecord(role, 1, 0.0, deployment.url, "log") for role in ("prefill", "decode")]
    default_state_dir().mkdir(parents=True)
    write_state(default_state_dir(), StackState("m", "small", tuple(records), ready=True))
    (default_state_dir() / "prefill.log").write_text("bidikv setting secret_file 'x' has 5 bytes; put 16\n")
    result = invoke("doctor")
    assert "FAIL  prefill engine: it refused to start: bidikv setting secret_file 'x' has 5 bytes" in result.stdout
    assert "FAIL  prefill 0: prefill_urls[0]: D finds nobody there" in result.stdout


def test_several_prefill_engines_are_told_apart(deployment):
    """Each has a line of its own, in the order of prefill_urls."""
    deployment.prefill.append({"state": "unreachable"})
    deployment.prefill.append({"state": "ready", "engine": facts("prefill", dtype="float16"), "clock_offset_s": 0.0})
    _, bad = diagnose(deployment.url)
    assert [one[1] for one in bad] == ["prefill 1", "prefill 2"]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://d:8200", "http://d:8200/v1"),
        ("http://d:8200/", "http://d:8200/v1"),
        ("http://d:8200/v1/", "http://d:8200/v1"),
        ("https://x/pool/v1", "https://x/pool/v1"),
    ],
)
def test_a_bare_host_is_enough(given, used):
    """Nobody has to remember the /v1."""
    assert with_version_path(given) == used


def test_a_port_that_others_reach_wants_keys(deployment):
    """On a loopback address no keys are fine; elsewhere they are worth a warning."""
    from server_ext.cli._checks import judge
    from server_ext.cli._examine import Evidence

    found = Evidence("http://d.example:8200/v1", engine=deployment.engine)
    (tenants,) = [one for one in judge(found, "x") if one.check == "tenants"]
    assert (tenants.status, "--api-key" in tenants.fix) == ("WARN", True)
