"""D's call to P, with a deadline of its own: a P that is gone, stuck or slow costs time, never the turn."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from bidikv_sdk.prefix import num_blocks
from bidikv_sdk.wire import REASONS
from server_ext.core.tickets import REFUSAL_REASONS
from server_ext.http.prefill_route import PREFILL_PATH, REQUEST_PREFIX, pack_ids, prefill_token

if TYPE_CHECKING:
    from array import array

    from bidikv_sdk.wire import Reason
    from server_ext.engine.settings import EngineSettings

# Before the first turn has shown P's rate. Slow on purpose: a deadline that is too long costs a stuck turn some
# time, one that is too short throws a healthy P's work away.
_PRIOR_TOKENS_PER_S = 50.0
_GRACE_S = 10.0
# Of a new observation in the expected rate; a P that misses its deadline is expected to be half as fast from then on.
_WEIGHT = 0.3
# Fewer computed tokens measure the call, not the rate.
_MIN_OBSERVED_TOKENS = 128
# A turn must end long before the home gives it up, whatever P does.
_MAX_SHARE_OF_TURN = 0.25
_ADDRESS_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host")
# A peer that does not even accept is asked no longer than this.
_CONNECT_TIMEOUT_S = 2.0
# P's own refusals: such a call never reached its engine. Any other may be a proxy's, about a call that did.
_REFUSALS = frozenset({400, 401, 403, 404})
# vLLM closes idle connections after 5 s: one that is just being closed would look like a P that is gone.
_KEEPALIVE_S = 2.0


class PrefillUnavailable(Exception):
    """No P answered.

    `may_still_read` tells whether one could still be reading the ticket; `failed_urls` are the Ps that were asked, and
    `reason` is the turn's.
    """

    def __init__(self, message: str, *, may_still_read: bool, reason: Reason = "prefill_unavailable") -> None:
        super().__init__(message)
        self.may_still_read = may_still_read
        self.reason = reason
        self.failed_urls: list[str] = []


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer.

    - `params`: vLLM's transfer parameters with which D reads what P computed.
    - `local_tokens`, `fetched_tokens`: of the prompt, from P's own prefix cache and from D's lease.
    - `fetch_s`: duration of P's read, in seconds; None where nothing was fetched.
    - `reason`: why a ticket was not used; None where it was, or where there was none.
    - `fingerprint`: of the model and weights that P computed with.
    - `read_age_s`: how long before its answer P's read had ended, in seconds; None where nothing was fetched.
    - `url`: of the P that answered; `failed_urls` are those that were asked before it.
    """

    params: dict[str, Any]
    local_tokens: int
    fetched_tokens: int
    fetch_s: float | None
    reason: str | None
    read_age_s: float | None
    fingerprint: str
    url: str
    failed_urls: list[str] = field(default_factory=list)


class PrefillClient:
    """Calls the Ps of a deployment, in order, until one answers."""

    def __init__(
        self, settings: EngineSettings, *, block_size: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Prepare calls; nothing is sent yet.

        Args:
            settings: of this D.
            block_size: tokens per block, on both sides.
            transport: in place of the network's, for tests.
        """
        self._urls = settings.prefill_urls
        self._timeout_s = settings.prefill_timeout_s
        self._block_size = block_size
        self._least_hold_s = settings.kv_lease_duration_s
        self._max_deadline_s = _MAX_SHARE_OF_TURN * settings.home.turn_timeout_s
        self._tokens_per_s = _PRIOR_TOKENS_PER_S
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {prefill_token(settings.secret)}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S),
            transport=transport,
            trust_env=False,  # a proxy from the environment has no place between P and D
        )

    async def prefill(
        self, token_ids: array[int], params: dict[str, Any], *, cache_salt: str | None, request_id: str
    ) -> Prefilled:
        """Have a prompt computed.

        Args:
            token_ids: [num_tokens], the prompt.
            params: signed transfer parameters: a ticket, or a plain prefill.
            cache_salt: of P's prefix cache; None for none.
            request_id: for the logs of both sides.

        Returns:
            What P did.

        Raises:
            PrefillUnavailable: no P answered rightly in time.
        """
        body = {"token_ids": pack_ids(token_ids), "kv_transfer_params": params, "cache_salt": cache_salt}
        failure = PrefillUnavailable("no prefill_urls are set", may_still_read=False)
        failed_urls: list[str] = []
        for url in self._urls:
            try:
                prefilled = await self._call(url, body, len(token_ids), request_id)
            except PrefillUnavailable as error:  # noqa: PERF203 - a network call dwarfs the try
                failure = error
                failed_urls.append(url)
                if error.may_still_read:
                    break  # its ticket may be in use: another P would be a second reader
            else:
                prefilled.failed_urls.extend(failed_urls)
                return prefilled
        failure.failed_urls = failed_urls
        raise failure

    async def _call(self, url: str, body: dict[str, Any], num_tokens: int, request_id: str) -> Prefilled:
        deadline_s = self._timeout_s or min(_GRACE_S + 2 * num_tokens / self._tokens_per_s, self._max_deadline_s)
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._http.post(url + PREFILL_PATH, json=body, headers={"X-Request-Id": request_id})
                reply.raise_for_status()
                prefilled = self._check(url, reply.json(), num_tokens)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            msg = f"prefill node {url} cannot be reached: {error!r}"
            raise PrefillUnavailable(msg, may_still_read=False) from error
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError, RecursionError) as error:
            msg = f"prefill node {url} failed after {time.perf_counter() - started_s:.1f} s: {error!r}"
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _REFUSALS
            if isinstance(error, TimeoutError):
                self._tokens_per_s /= 2
            raise PrefillUnavailable(msg, may_still_read=not refused) from error
        num_computed = num_tokens - prefilled.local_tokens - prefilled.fetched_tokens
        if num_computed >= _MIN_OBSERVED_TOKENS:
            rate = num_computed / (time.perf_counter() - started_s)
            self._tokens_per_s += _WEIGHT * (rate - self._tokens_per_s)
        return prefilled

    def _check(self, url: str, reply: dict[str, Any], num_tokens: int) -> Prefilled:
        """Take P's answer apart; what D's engine would trip over is refused here.

        Raises:
            ValueError, KeyError, TypeError: not the answer of a P.
            PrefillUnavailable: P holds the call's parameters for forged, and keeps nothing for D.
        """
        params = dict(reply["kv_transfer_params"])
        report = params.pop("bidikv")
        if isinstance(report, dict) and report.get("refusal") == "forged":
            msg = f"prefill node {url} refused the ticket: forged; D and P must have the same secret_file"
            raise PrefillUnavailable(msg, may_still_read=False, reason=REFUSAL_REASONS["forged"])
        # With this vLLM would show P's own prefix hits as D's, and hide whether D could read what P computed.
        params.pop("remote_prefill_cached_tokens", None)
        (block_ids,) = params["remote_block_ids"]
        local_tokens, fetched_tokens = report["local_tokens"], report["fetched_tokens"]
        fetch_s, reason, read_age_s = report["fetch_s"], report["reason"], report["read_age_s"]
        hold_s = report["hold_s"]
        rules = (
            (len(block_ids) == num_blocks(num_tokens, self._block_size), "number of blocks"),
            (all(type(block_id) is int and block_id >= 0 for block_id in block_ids), "block ids"),
            (params.get("do_remote_prefill") is True, "do_remote_prefill"),
            (type(local_tokens) is int and type(fetched_tokens) is int, "token counts"),
            (min(local_tokens, fetched_tokens) >= 0 and local_tokens + fetched_tokens <= num_tokens, "token counts"),
            (fetch_s is None or isinstance(fetch_s, int | float), "fetch_s"),
            (read_age_s is None or isinstance(read_age_s, int | float), "read_age_s"),
            (isinstance(report["fingerprint"], str), "fingerprint"),
            (all(isinstance(params[name], str) for name in _ADDRESS_FIELDS), "address"),
            (type(params["remote_port"]) is int, "address"),
            # Under another name P may not understand that D waits, or that it has read.
            (str(params["remote_request_id"]).startswith(REQUEST_PREFIX), "remote_request_id"),
            (math.isfinite(params["remote_blocks_expiry_time"]), "remote_blocks_expiry_time"),
            # D counts on heartbeats that hold the blocks for as long as its own setting says.
            (hold_s >= self._least_hold_s, f"kv_lease_duration of {hold_s} s; set at least {self._least_hold_s} on P"),
            (reason is None or reason in REASONS, "reason"),
        )
        for holds, what in rules:
            if not holds:
                msg = f"the answer for {num_tokens} tokens has a wrong {what}"
                raise ValueError(msg)
        return Prefilled(params, local_tokens, fetched_tokens, fetch_s, reason, read_age_s, report["fingerprint"], url)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
