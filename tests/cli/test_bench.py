"""`bidikv bench`: what it refuses before anything is measured. Measuring needs engines."""

import pytest


def test_without_a_server_it_says_what_to_give(invoke):
    """Nothing runs and nothing is named: the options are."""
    result = invoke("bench")
    assert result.exit_code == 2
    assert "--base-url" in result.stderr


def test_without_a_prefill_engine_it_says_what_to_give(invoke, deployment):
    """P cannot be guessed from D's address."""
    result = invoke("bench", "--base-url", deployment.url)
    assert result.exit_code == 2
    assert "--prefill-url" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--arms", "no_reuse,teleport"), "--arms 'no_reuse,teleport': give some of no_reuse, prefill_cache"),
        (("--max-tokens", "1"), "too small"),
        (("--model", "no-such-model"), "no-such-model"),
        ((), "model 'm' is neither known nor a folder here: give its config.json as --model"),
        (("--traces", "no/such/folder"), "no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(invoke, deployment, options, told):
    """One line names the option, its value and what to give; nothing was sent to an engine."""
    result = invoke("bench", "--base-url", deployment.url, "--prefill-url", "http://127.0.0.1:9", *options)
    assert result.exit_code == 1
    assert told in result.stderr


def test_engines_that_cannot_be_emptied_are_not_measured(invoke, deployment):
    """An engine that is not there, or has no development routes, ends the run before it says anything wrong."""
    options = ("--base-url", deployment.url, "--prefill-url", "http://127.0.0.1:9", "--model", "llama-3.1-8b")
    result = invoke("bench", *options, "--sessions", "1")
    assert result.exit_code == 1
    assert "an engine does not answer as it should" in result.stderr
