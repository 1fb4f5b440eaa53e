"""What each way of a turn is expected to cost, and the floor of a turn that goes over P."""

import pytest

from server_ext.core.cost import Situation, estimate_s, floor_s

TOKEN_BYTES = 1000


class PlainRates:
    """Rates of round numbers: 1 ms a token on P, 2 ms on D, 1 us a byte on the link, and a fixed cost of each."""

    decode_step_s = 0.02

    def prefill_s(self, num_tokens, *, num_cached=0):
        """Return P's time."""
        return 0.1 + 0.001 * num_tokens

    def append_s(self, num_tokens, *, num_cached=0):
        """Return D's time."""
        return 0.2 + 0.002 * num_tokens

    def fetch_s(self, num_bytes, *, pair=""):
        """Return the time of a read by P."""
        return 0.01 + 1e-6 * num_bytes

    def handover_s(self, num_bytes, *, pair=""):
        """Return the time of a read by D, and its first step."""
        return 0.03 + 1e-6 * num_bytes


def expected_s(way, **situation):
    """Return the estimate of one way for a prompt of 1,000 tokens, of which D holds 900 unless said otherwise."""
    values = {"prompt_tokens": 1000, "matched_tokens": 900} | situation
    return estimate_s(way, Situation(**values), PlainRates(), token_bytes=TOKEN_BYTES)


def test_local_appends_what_is_new():
    """D computes the 100 new tokens; nothing travels."""
    assert expected_s("local") == pytest.approx(0.4)


def test_fetch_reads_computes_and_hands_over():
    """P reads 900 tokens, computes 100, and D reads those."""
    assert expected_s("fetch") == pytest.approx(0.91 + 0.2 + 0.13)


def test_prefill_without_a_cache_computes_all():
    """P computes 1,000 tokens; D reads only the 100 that it lacks."""
    assert expected_s("prefill") == pytest.approx(1.1 + 0.13)


def test_recompute_hands_over_all():
    """The yardstick knows no cache anywhere, so D reads the whole prompt."""
    assert expected_s("recompute", cached_tokens=900, cached_share=1.0) == pytest.approx(1.1 + 1.03)


def test_ps_own_cache_spares_what_it_holds():
    """Where P's cache certainly holds 800 tokens, it computes 200 of a prefill, and reads 100 of a fetch."""
    warm = {"cached_tokens": 800, "cached_share": 1.0}
    assert expected_s("prefill", **warm) == pytest.approx(0.3 + 0.13)
    assert expected_s("fetch", **warm) == pytest.approx(0.11 + 0.2 + 0.13)


def test_a_cache_that_covers_the_lease_leaves_nothing_to_fetch():
    """P holds more than D's lease: a fetch is a prefill then."""
    warm = {"cached_tokens": 950, "cached_share": 1.0}
    assert expected_s("fetch", **warm) == expected_s("prefill", **warm) == pytest.approx(0.15 + 0.13)


def test_a_doubtful_cache_counts_by_its_chance():
    """Half a chance of the cache is half of what it would spare."""
    cold, warm = expected_s("prefill"), expected_s("prefill", cached_tokens=800, cached_share=1.0)
    assert expected_s("prefill", cached_tokens=800, cached_share=0.5) == pytest.approx((cold + warm) / 2)


def test_waits_come_on_top():
    """Each side's queue is waited for by what goes there."""
    waits = {"decode_wait_s": 1.0, "prefill_wait_s": 5.0}
    assert expected_s("local", **waits) == pytest.approx(expected_s("local") + 1)
    assert expected_s("fetch", **waits) == pytest.approx(expected_s("fetch") + 5)


def test_one_token_is_always_computed():
    """A prompt that D holds to its last token still needs one step."""
    assert expected_s("local", matched_tokens=1000) == pytest.approx(0.202)
    assert expected_s("prefill", cached_tokens=1000, cached_share=1.0) == pytest.approx(0.101 + 0.13)


def test_the_floor_is_computing_bytes_and_one_step():
    """Both directions' bytes, the delta's computation, and a decode step even where handing over is faster."""
    rates = PlainRates()
    parts = {"computed_tokens": 100, "cached_tokens": 900, "pair": "p"}
    both = floor_s(rates, fetched_bytes=900_000, handover_bytes=100_000, **parts)
    assert both == pytest.approx(0.2 + 0.91 + 0.13)
    assert floor_s(rates, fetched_bytes=0, handover_bytes=0, **parts) == pytest.approx(0.2 + 0.03)
    rates.decode_step_s = 0.5
    assert floor_s(rates, fetched_bytes=0, handover_bytes=0, **parts) == pytest.approx(0.2 + 0.5)
