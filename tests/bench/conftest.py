import pytest

from bench._result import Result
from bench._turns import MeasuredTurn
from bidikv_sdk.wire import CacheReport, Timings


def make_turn(number, *, held, fetched, prompt, ttft_s, token_ids=(5, 6), **timings_s):
    """A turn that computed what it did not fetch."""
    cache = CacheReport(
        outcome="fetched" if fetched else "recomputed",
        reason="forced" if held else "first_turn",
        prompt_tokens=prompt,
        held_tokens=held,
        reused_tokens=0,
        fetched_tokens=fetched,
        computed_tokens=prompt - fetched,
        timings_s=Timings(**{"render": 0.010, "begin": 0.005, "settle": 0.005, **timings_s}),
    )
    return MeasuredTurn(number, cache, ttft_s, "text", len(token_ids), [1, 2, 3], list(token_ids))


@pytest.fixture
def make_result():
    """Builds results of two turns behind 2,000 tokens, good ones unless told otherwise.

    P computes 100 tokens/s and its attention is free, so a prompt of 2,100 takes 21 s and a delta of 100 takes 1 s.
    """

    def make(*, fetched=2000, ttft_s=1.5, token_ids=(5, 6), begin_s=0.005, fetched_without=0, **changes):
        first = make_turn(1, held=0, fetched=0, prompt=2000, ttft_s=20.5, prefill=20.0, begin=begin_s)
        second = make_turn(
            2,
            held=2000,
            fetched=fetched,
            prompt=2100,
            ttft_s=ttft_s,
            token_ids=token_ids,
            fetch=0.2,
            prefill=1.2,
            begin=begin_s,
        )
        again = make_turn(2, held=2000, fetched=fetched_without, prompt=2100, ttft_s=21.0, prefill=21.0)
        fields = {
            "turns": [first, second],
            "turns_without_reuse": [first, again],
            "idle_cpu_cores": 0.05,
            "idle_lease_state": "active",
            "versions": {"vllm": "0"},
            "attention_tokens": float("inf"),  # a rate in tokens per second alone
            "short_prefills": [(10, 0.1)],
        }
        return Result(**{**fields, **changes})

    return make
