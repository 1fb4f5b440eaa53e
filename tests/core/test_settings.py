"""Settings are checked once, at start, and errors say what to do."""

import pytest

from server_ext.core.settings import HomeSettings


def test_absent_settings_have_their_defaults():
    """An empty configuration is a good one."""
    assert HomeSettings.from_config({}) == HomeSettings()


def test_given_settings_are_taken():
    """Each given value replaces its default; whole numbers are fine as seconds."""
    settings = HomeSettings.from_config({"default_ttl_s": 30, "default_route": "local", "min_fetch_tokens": 0})
    assert (settings.default_ttl_s, settings.default_route, settings.min_fetch_tokens) == (30, "local", 0)


def test_an_unknown_name_is_refused():
    """A misspelt setting is an error that lists the known ones, not a silent default."""
    with pytest.raises(ValueError, match=r"'budget' \(value 0.5\) is unknown: use one of budget_fraction, "):
        HomeSettings.from_config({"budget": 0.5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_fraction", 0),
        ("budget_fraction", 1.01),
        ("tenant_share", "0.5"),
        ("tenant_share", True),
        ("default_ttl_s", -1),
        ("max_ttl_s", float("inf")),
        ("ticket_ttl_s", float("nan")),
        ("ticket_grace_s", None),
        ("provisional_ttl_s", 0),
        ("turn_timeout_s", [900]),
        ("session_retention_s", "1h"),
        ("max_sessions", 0),
        ("max_sessions", 10.5),
        ("max_session_bytes", True),
        ("default_route", "fastest"),
        ("min_fetch_tokens", -1),
    ],
)
def test_a_bad_value_is_refused_by_name_with_the_fix(name, value):
    """The error names the setting and the value, and says what to give."""
    with pytest.raises(ValueError, match=f"bidikv setting '{name}' is .*: give ") as caught:
        HomeSettings.from_config({name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "config", [{"default_ttl_s": 901}, {"max_ttl_s": 4000}, {"session_retention_s": 899, "max_ttl_s": 900}]
)
def test_lives_that_contradict_each_other_are_refused(config):
    """A default beyond the maximum, or a session that could go before its lease, is an error."""
    with pytest.raises(ValueError, match="give at most '"):
        HomeSettings.from_config(config)
