"""Takes each guard out, one at a time, and checks that the tests which stand for it fail: `python tests/mutants.py`.

A test that cannot fail promises nothing. Works on a copy of the tree, so that what is edited here stays as it is. Names
on the command line choose guards (parts of the names of their files or tests); without any, all are taken out. Prints
what survived, and exits with 1 where anything did. With `--engines` the tests that need engines run, in place of the
others; each guard takes minutes then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("bench", "bidikv_sdk", "docs", "examples", "server_ext", "tests", "pyproject.toml")
# A guard against waiting for ever may leave a test that does.
LONGEST_S = 120
LONGEST_WITH_ENGINES_S = 900

OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
PRELOADED = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
)

LEASES = "tests/core/test_leases.py"
LOST = "tests/core/test_lost.py"
TICKETS = "tests/core/test_tickets.py"
RENDER = "tests/http/test_render.py"
ROUTES = "tests/http/test_routes.py"
IN_SCHEDULER = "tests/scheduler/test_leases_in_the_scheduler.py"
IN_FLIGHT = "tests/scheduler/test_steps_in_flight.py"
LOST_IN_SCHEDULER = "tests/scheduler/test_lost_leases_in_the_scheduler.py"
HOLDS = "tests/scheduler/test_holds.py"
READS = "tests/scheduler/test_reads_in_the_scheduler.py"
BLOCKS = "tests/scheduler/test_what_blocks_hold.py"
BOTH_WAYS = "tests/scheduler/test_both_ways_at_once.py"
LATE_READS = "tests/scheduler/test_late_reads.py"
RENEWALS = "tests/scheduler/test_many_renewals.py"
STARTUP = "tests/scheduler/test_startup.py"
WEIGHTS_AND_SLEEP = "tests/scheduler/test_weights_and_sleep.py"


@dataclass(frozen=True)
class Mutant:
    """One guard, and what must fail without it.

    - `file`, `guard`: where it stands, exactly once.
    - `without`: what stands there instead.
    - `tests`: each of them must fail.
    """

    file: str
    guard: str
    without: str
    tests: tuple[str, ...]


MUTANTS = (
    # Tickets: signed, for this prompt, once, in time.
    Mutant(
        "server_ext/core/tickets.py",
        "return unsigned if is_genuine else None",
        "return unsigned",
        (
            f"{TICKETS}::test_any_change_breaks_the_mac",
            f"{READS}::test_a_ticket_that_this_deployment_did_not_sign_is_nothing",
            f"{IN_SCHEDULER}::test_parameters_that_nobody_signed_are_ignored",
            "tests/engine/test_foreign.py::test_an_engine_believes_only_what_is_signed",
        ),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        "        self._counts.add(metrics.TICKETS_REFUSED, refusal)\n",
        "",
        (
            f"{READS}::test_a_ticket_that_this_deployment_did_not_sign_is_nothing",
            f"{READS}::test_a_ticket_that_does_not_fit_is_refused_and_the_prompt_computed",
            f"{READS}::test_a_ticket_is_good_for_one_read",
        ),
    ),
    Mutant(
        "server_ext/http/prefill_client.py",
        'if isinstance(report, dict) and report.get("refusal") == "forged":',
        "if False:",
        ("tests/http/test_prefill_client.py::test_a_p_that_holds_the_ticket_for_forged",),
    ),
    Mutant(
        "server_ext/core/tickets.py",
        'if issued_for["prompt_hash"] != hash_ids(prompt_ids, num_tokens):',
        "if False:",
        (
            f"{TICKETS}::test_a_ticket_that_does_not_fit_is_refused_by_name",
            f"{READS}::test_a_ticket_that_does_not_fit_is_refused_and_the_prompt_computed",
            "tests/engine/test_faults.py::test_a_bad_ticket_costs_time_and_nothing_else",
        ),
    ),
    Mutant(
        "server_ext/core/tickets.py",
        'if params["remote_request_id"] in seen_ids:',
        "if False:",
        (
            f"{READS}::test_a_ticket_is_good_for_one_read",
            "tests/engine/test_faults.py::test_a_ticket_is_for_one_read",
        ),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "num_matched = min(common_prefix_length(lease.token_ids, prompt_ids), lease.num_tokens)",
        "num_matched = min(len(prompt_ids), lease.num_tokens)",
        (
            f"{BLOCKS}::test_an_edited_session_leaves_the_original_to_others",
            f"{LEASES}::test_an_edited_prompt_matches_up_to_the_first_difference",
            "tests/http/test_divergence.py::test_a_template_that_strips_reasoning_changes_the_messages",
            "tests/http/test_divergence.py::test_each_family_says_what_it_rewrites",
            "tests/http/test_divergence.py::test_a_partly_filled_last_block_is_compared_token_by_token",
        ),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "if num_matched < min(lease.num_tokens, len(prompt_ids)) else None",
        "if num_matched < lease.num_tokens else None",
        (f"{LEASES}::test_a_prompt_within_the_history_does_not_diverge",),
    ),
    Mutant(
        "server_ext/core/ledger.py",
        '"""Take the references of a ticket."""\n        self._pins.pin(block_ids)\n',
        '"""Take the references of a ticket."""\n',
        (
            f"{LEASES}::test_nothing_is_freed_under_an_open_ticket",
            f"{BLOCKS}::test_the_blocks_of_a_ticket_are_written_again_only_when_it_is_over",
        ),
    ),
    Mutant(
        "server_ext/core/ticket_desk.py",
        "if now_s - read_age_s >= given_back_s:",
        "if False:",
        (
            f"{LEASES}::test_a_read_that_outlasted_its_blocks_is_counted",
            f"{BLOCKS}::test_the_blocks_of_a_ticket_are_written_again_only_when_it_is_over",
        ),
    ),
    Mutant(
        "server_ext/core/ticket_desk.py",
        "elif not self._held.ledger.can_ticket(block_ids, max_ticketed=self._max_ticketed):",
        "elif False:",
        (
            f"{LEASES}::test_tickets_leave_room_for_the_longest_request",
            f"{BOTH_WAYS}::test_everything_goes_on_where_both_are_full",
        ),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "if isinstance(read, ReadTickets):",
        "if False:",
        (
            "tests/scheduler/test_tickets_in_the_scheduler.py::test_a_readers_note_returns_its_ticket",
            "tests/engine/test_tickets.py::test_a_readers_note_returns_its_ticket",
        ),
    ),
    # Reads on P and on D: once, and a failure is computed.
    Mutant(
        "server_ext/engine/prefill.py",
        'if params.get("_remote_blocks_processed"):',
        "if False:",
        (
            f"{READS}::test_a_failed_read_is_computed_and_never_asked_for_again",
            f"{READS}::test_a_preempted_reader_computes",
            f"{IN_FLIGHT}::test_p_reads_a_ticket_under_async_scheduling",
            f"{BOTH_WAYS}::test_everything_goes_on_where_both_are_full",
        ),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        'return "ticket_late" if read.is_late(time.perf_counter()) else None',
        "return None",
        (f"{READS}::test_a_ticket_that_does_not_fit_is_refused_and_the_prompt_computed",),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        "return self.ttl_s is not None and now_s - self.arrival_s + _EXPIRY_MARGIN_S >= self.ttl_s",
        "return False",
        (
            f"{READS}::test_a_ticket_that_does_not_fit_is_refused_and_the_prompt_computed",
            "tests/engine/test_two_tenants.py::test_a_late_ticket",
        ),
    ),
    Mutant(
        "server_ext/http/turn.py",
        "if self._handover_failed():",
        "if False:",
        (f"{ROUTES}::test_what_d_could_not_read_from_p_is_told",),
    ),
    Mutant(
        "server_ext/http/turn.py",
        "            self._failed_urls = unavailable.failed_urls\n            return None\n",
        "            self._failed_urls = unavailable.failed_urls\n            raise\n",
        (
            f"{ROUTES}::test_without_p_the_turn_is_computed_on_d",
            "tests/engine/test_outcomes.py::test_with_p_gone_and_back",
        ),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        "        return delay_free, params\n\n    def on_weight_version",
        "        return False, params\n\n    def on_weight_version",
        (f"{BOTH_WAYS}::test_an_abort_while_both_ways_are_under_way",),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "return now_s >= end_s",
        "return False",
        (
            f"{LATE_READS}::test_a_read_that_ended_after_its_deadline_has_failed",
            f"{LATE_READS}::test_each_read_is_judged_by_its_own_ticket",
        ),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "remote.blocks_expiry_time - self._engine_clock_offset[remote.engine_id]",
        "remote.blocks_expiry_time",
        (
            f"{LATE_READS}::test_a_read_that_ended_after_its_deadline_has_failed",
            f"{LATE_READS}::test_a_read_that_ended_before_its_deadline_is_believed",
        ),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        '"remote_engine_id": self.engine_id,',
        '"remote_engine_id": "d",',
        ("tests/scheduler/test_tickets_in_the_scheduler.py::test_each_life_of_an_engine_signs_tickets_of_its_own",),
    ),
    # What P may still be reading stays, however the turn ended.
    Mutant(
        "server_ext/http/turn.py",
        "if self.plan.ticket is not None and not self._may_still_read:",
        "if self.plan.ticket is not None:",
        (
            f"{ROUTES}::test_without_p_the_turn_is_computed_on_d",
            "tests/engine/test_memory.py::test_blocks_of_a_ticket_whose_reader_is_stuck",
        ),
    ),
    Mutant(
        "server_ext/http/turn.py",
        '"return_ticket": not self._may_still_read}',
        '"return_ticket": True}',
        (
            f"{ROUTES}::test_a_client_that_leaves_while_p_computes",
            "tests/engine/test_faults.py::test_a_prefill_that_is_given_up_during_its_read",
        ),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "            ticket, ticket_reason = self._desk.check_out(turn, lease, num_matched, now_s=now_s)\n",
        "            pass\n",
        (
            f"{LEASES}::test_an_appended_prompt_matches_all_that_is_held",
            "tests/engine/test_turns.py::test_every_later_turn_fetches_all_that_is_held",
        ),
    ),
    # What a lease holds.
    Mutant(
        "server_ext/engine/decode.py",
        "        compat.RequestStatus.FINISHED_ABORTED,\n",
        "",
        (
            f"{IN_SCHEDULER}::test_a_stop_string_is_an_abort_and_still_leased",
            "tests/engine/test_continuation.py::test_after_a_stop_string",
        ),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "if turn is None or turn.pin is not None or turn.has_old_weights or num_tokens <= 0:",
        "if turn is None or turn.pin is not None:",
        (f"{LEASES}::test_a_request_without_computed_tokens_leaves_the_old_lease",),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "            if turn.pin is None:\n                self._explain_lost_pin(turn)\n",
        "",
        (f"{LEASES}::test_a_first_turn_without_computed_tokens_says_that_they_were_taken",),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "certain = request.num_computed_tokens - request.num_in_flight_tokens",
        "certain = request.num_computed_tokens",
        (
            f"{IN_SCHEDULER}::test_a_lease_never_counts_a_step_that_is_still_in_flight",
            f"{IN_FLIGHT}::test_an_abort_while_a_step_is_in_flight",
            f"{IN_FLIGHT}::test_a_read_from_p_under_async_scheduling",
            f"{IN_FLIGHT}::test_placeholders_of_drafts_in_flight_are_not_leased",
        ),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "certain = request.num_computed_tokens - request.num_in_flight_tokens",
        "certain = request.num_tokens + len(request.spec_token_ids)",
        (
            f"{IN_FLIGHT}::test_a_rejected_draft_is_not_leased",
            f"{IN_FLIGHT}::test_drafts_that_were_not_scheduled_yet_are_not_leased",
        ),
    ),
    Mutant(
        "server_ext/core/holdings.py",
        "        self.ledger.pin(shared_ids)\n",
        "",
        (f"{BLOCKS}::test_an_edited_session_leaves_the_original_to_others",),
    ),
    Mutant(
        "server_ext/core/leases.py",
        'array("i", block_ids[: num_blocks(num_tokens, self._block_size)])',
        'array("i", block_ids)',
        (f"{LEASES}::test_finish_believes_the_smallest_of_its_numbers",),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "return int(min(max(certain, 0), request.num_tokens))",
        "return int(max(certain, 0))",
        (f"{IN_FLIGHT}::test_an_answer_that_ends_within_accepted_drafts",),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "    if request.num_output_tokens == 0:\n        return 0\n",
        "",
        (
            f"{IN_SCHEDULER}::test_an_abort_before_the_first_token_leases_nothing",
            f"{IN_FLIGHT}::test_an_abort_during_a_read_waits_for_its_end",
        ),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "        return delay_free, params\n\n    def build_connector_meta",
        "        return True, params\n\n    def build_connector_meta",
        (f"{IN_SCHEDULER}::test_an_idle_scheduler_has_nothing_to_do_for_a_lease",),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        "if nonce is not None and self._home.leases.is_open(nonce) and request.status in _LEASABLE:",
        "nonce = nonce and next(iter(self._home.leases._held.turns), None)\n"
        "        if nonce is not None and request.status in _LEASABLE:",
        (f"{IN_SCHEDULER}::test_a_session_id_of_a_client_reaches_no_lease",),
    ),
    # Memory: requests win, within budgets, and nobody for ever.
    Mutant(
        "server_ext/engine/compat.py",
        "while slots is None and make_room(_num_missing_blocks(manager, arguments)):",
        "while False:",
        (
            f"{IN_SCHEDULER}::test_a_running_request_takes_a_leased_block_instead_of_being_preempted",
            f"{IN_FLIGHT}::test_a_running_request_takes_a_leased_block_with_a_step_in_flight",
            f"{IN_SCHEDULER}::test_a_new_request_is_admitted_in_the_same_step_as_on_an_empty_pool",
            f"{BOTH_WAYS}::test_everything_goes_on_where_both_are_full",
            "tests/engine/test_memory.py::test_a_plain_request_gets_its_blocks_from_leases",
        ),
    ),
    Mutant(
        "server_ext/core/revocation.py",
        "if dropped[block_id] == num_references(block_id):",
        "if True:",
        ("tests/core/test_revocation.py::test_blocks_that_a_request_holds_gain_nothing",),
    ),
    Mutant(
        "server_ext/core/revocation.py",
        "num_freed += num_ours[block_id] == num_references(block_id)",
        "num_freed += 1",
        ("tests/core/test_revocation.py::test_blocks_under_a_ticket_are_not_reclaimable",),
    ),
    Mutant(
        "server_ext/core/policy.py",
        'return sorted(leases, key=attrgetter("due_s"))',
        'return sorted(leases, key=attrgetter("due_s"), reverse=True)',
        ("tests/core/test_revocation.py::test_the_lease_with_the_least_remaining_time_gives_way_first",),
    ),
    Mutant(
        "server_ext/core/holdings.py",
        "        return self.ledger.num_affordable(\n"
        "            tenant, block_ids, max_leased=self._max_leased, max_tenant_leased=self._max_tenant_leased\n"
        "        )\n",
        "        return len(block_ids)\n",
        (
            f"{LEASES}::test_over_the_budget_a_lease_is_clipped_to_whole_blocks",
            f"{LOST}::test_regaining_keeps_to_the_budget",
        ),
    ),
    Mutant(
        "server_ext/core/ledger.py",
        "            room -= block_id not in leased\n",
        "            room -= 1\n",
        (f"{LEASES}::test_a_shared_block_costs_its_budget_once",),
    ),
    Mutant(
        "server_ext/core/holdings.py",
        "while (item := self._deadlines.pop_due(now_s=now_s)) is not None:",
        "while (item := None) is not None:",
        (
            f"{LEASES}::test_every_verb_sees_the_world_after_the_sweep",
            "tests/engine/test_memory.py::test_an_expired_lease_is_free_at_the_first_look",
        ),
    ),
    Mutant(
        "server_ext/core/deadlines.py",
        "            elif item.due_s > now_s:\n                self.schedule(item)\n",
        "            elif item.due_s > now_s:\n                self.schedule(item)\n                return None\n",
        (f"{LEASES}::test_one_sweep_reclaims_every_expired_lease_whatever_its_place",),
    ),
    Mutant(
        "server_ext/core/leases.py",
        "            raise LeaseLost(msg, reason=reason)\n        self._held.renew(key, ttl_s, now_s=now_s)\n",
        "            raise LeaseLost(msg, reason=reason)\n",
        (f"{RENEWALS}::test_128_leases_are_renewed_behind_every_step", f"{LEASES}::test_extend_never_shortens"),
    ),
    Mutant(
        "server_ext/core/deadlines.py",
        "if self._num_dead > _MIN_DEAD_TO_TIDY and self._num_dead > len(self._heap) // 2:",
        "if False:",
        (f"{LEASES}::test_renewing_for_ever_costs_no_memory",),
    ),
    Mutant(
        "server_ext/core/session_store.py",
        "max(candidates, key=lambda c: (c[0], -c[1].last_used_s), default=(0, None))[1]",
        "max(candidates, key=lambda c: -c[1].last_used_s, default=(0, None))[1]",
        (
            "tests/core/test_session_store.py::test_the_tenant_that_has_most_makes_room",
            "tests/core/test_session_store.py::test_nobody_loses_a_session_to_a_tenant_that_has_more",
        ),
    ),
    # Leases that are gone.
    Mutant(
        "server_ext/core/leases.py",
        "lease = self._held.regain(key, fingerprint, now_s=now_s)",
        "pass",
        (
            f"{LOST}::test_an_expired_lease_is_regained_for_a_reader",
            f"{LOST_IN_SCHEDULER}::test_an_expired_lease_is_pinned_again_for_its_reader",
            "tests/engine/test_outcomes.py::test_after_expiry",
        ),
    ),
    Mutant(
        "server_ext/core/lost.py",
        "if before is not now",
        "if before != now",
        (f"{LOST_IN_SCHEDULER}::test_an_equal_prefix_that_is_only_being_computed_is_not_pinned",),
    ),
    Mutant(
        "server_ext/core/lost.py",
        "num_intact = next((i for i, (before, now) in pairs if before is not now), len(lost.seals))",
        "num_intact = len(lost.seals)",
        (
            f"{LOST_IN_SCHEDULER}::test_what_other_requests_have_written_over_is_lost",
            f"{LOST}::test_only_what_nobody_has_written_over_is_regained",
        ),
    ),
    Mutant(
        "server_ext/core/leases.py",
        '            slot.state, slot.reason = "released", "released"\n            self._held.lost.forget(key)\n',
        '            slot.state, slot.reason = "released", "released"\n',
        (
            f"{LOST}::test_a_released_lease_is_never_regained",
            f"{LOST_IN_SCHEDULER}::test_a_release_after_the_end_is_final",
        ),
    ),
    Mutant(
        "server_ext/core/revocation.py",
        "        self._held.lost.clear()\n",
        "",
        (f"{LOST}::test_a_reset_leaves_nothing_to_regain",),
    ),
    # A reset, sleep and new weights: nothing is held any more, and nothing is taken from a reader.
    Mutant(
        "server_ext/engine/decode.py",
        "if self._home.leases.has_tickets(now_s=now_s):",
        "if False:",
        (
            f"{IN_SCHEDULER}::test_a_cache_reset_waits_for_readers",
            f"{WEIGHTS_AND_SLEEP}::test_sleep_while_a_reader_reads",
        ),
    ),
    Mutant(
        "server_ext/engine/decode.py",
        '        self._home.leases.release_all("reset", now_s=now_s)\n',
        "",
        (
            f"{IN_SCHEDULER}::test_a_cache_reset_releases_all_leases_first",
            f"{WEIGHTS_AND_SLEEP}::test_sleep_releases_all_leases_first",
            "tests/engine/test_memory.py::test_a_reset_of_the_prefix_cache_releases_all_leases",
        ),
    ),
    Mutant(
        "server_ext/core/revocation.py",
        "        for key in list(self._held.leases):\n",
        "        for key in [] if self._held.tickets else list(self._held.leases):\n",
        (
            f"{LEASES}::test_release_all_takes_every_lease_and_pin_and_leaves_the_tickets",
            f"{IN_SCHEDULER}::test_new_weights_while_a_reader_reads",
        ),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "            on_weight_version(weight_version)\n",
        "            pass\n",
        (
            f"{WEIGHTS_AND_SLEEP}::test_the_engine_tells_d_of_new_weights",
            f"{WEIGHTS_AND_SLEEP}::test_the_engine_tells_p_of_new_weights",
        ),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "if on_weight_version is not None:",
        "if True:",
        (f"{WEIGHTS_AND_SLEEP}::test_a_stock_engine_takes_new_weights",),
    ),
    Mutant(
        "server_ext/core/leases.py",
        " or turn.has_old_weights",
        "",
        (f"{IN_SCHEDULER}::test_new_weights_during_a_turn",),
    ),
    Mutant(
        "server_ext/core/revocation.py",
        'if reason == "model_changed":',
        "if False:",
        (f"{IN_SCHEDULER}::test_new_weights_during_a_turn",),
    ),
    # Start-up.
    Mutant(
        "server_ext/engine/compat.py",
        "        if refused:\n",
        "        if False:\n",
        (
            f"{STARTUP}::test_a_configuration_that_cannot_be_served_is_refused_by_name",
            f"{STARTUP}::test_models_with_several_kinds_of_attention_are_refused",
            f"{STARTUP}::test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name",
            f"{STARTUP}::test_host_buffers_on_a_gpu_are_refused",
        ),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "len(groups) != 1 or not",
        "not",
        (f"{STARTUP}::test_models_with_several_kinds_of_attention_are_refused",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "type(spec) is FullAttentionSpec",
        "isinstance(spec, FullAttentionSpec)",
        (f"{STARTUP}::test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "        and spec.sliding_window is None\n",
        "",
        (f"{STARTUP}::test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "        and spec.attention_chunk_size is None\n",
        "",
        (f"{STARTUP}::test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "        and not spec.non_causal\n",
        "",
        (f"{STARTUP}::test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "reads != exchanges,",
        "False,",
        (f"{STARTUP}::test_bidirectional_transfer_on_the_wrong_engine_is_refused",),
    ),
    Mutant(
        "server_ext/engine/compat.py",
        "num_api_servers != 1,",
        "False,",
        (f"{STARTUP}::test_a_configuration_that_cannot_be_served_is_refused_by_name",),
    ),
    Mutant(
        "server_ext/engine/settings.py",
        'if transfer.kv_connector == "MultiConnector":',
        "if False:",
        (f"{STARTUP}::test_another_connector_beside_ours_is_refused",),
    ),
    Mutant(
        "server_ext/engine/control.py",
        "if control is None:",
        "if False:",
        (f"{STARTUP}::test_an_engine_without_our_connector_says_so",),
    ),
    # Sessions, and what goes over HTTP.
    Mutant(
        "server_ext/core/sessions.py",
        "            self._remove(session)\n        self._add(opened)\n",
        "            self._drop(session, now_s=now_s)\n        self._add(opened)\n",
        (
            "tests/core/test_home.py::test_a_replaced_transcript_keeps_the_lease",
            "tests/engine/test_repeats.py::test_open_is_idempotent_and_takes_over_on_demand",
        ),
    ),
    Mutant(
        "server_ext/http/tenants.py",
        "if not self._has_keys:",
        "if True:",
        (
            f"{ROUTES}::test_another_tenant_sees_no_difference_to_an_unknown_session",
            "tests/http/test_tenants.py::test_each_key_is_a_tenant_of_its_own",
            "tests/engine/test_two_tenants.py::test_another_tenants_session_is_an_unknown_one",
            "tests/engine/test_two_tenants.py::test_the_same_id_is_two_sessions_of_two_tenants",
        ),
    ),
    Mutant(
        "server_ext/http/transfer_params.py",
        "if is_whole and names_transfer_params(",
        "if False and names_transfer_params(",
        (
            "tests/http/test_transfer_params.py::test_transfer_parameters_are_refused",
            "tests/engine/test_foreign.py::test_transfer_parameters_on_a_public_route",
        ),
    ),
    Mutant(
        "server_ext/http/turn_request.py",
        'if body.get("n") not in (None, 1):',
        "if False:",
        (
            "tests/http/test_turn_request.py::test_what_a_session_cannot_do_is_refused_by_name",
            "tests/engine/test_refusals.py::test_a_turn_that_is_refused",
        ),
    ),
    Mutant(
        "server_ext/http/conductor.py",
        "        finally:\n            await said.turn.abandon_whatever_happens()\n",
        "        finally:\n            pass\n",
        (f"{ROUTES}::test_a_client_that_leaves_its_stream",),
    ),
    Mutant(
        "server_ext/core/sessions.py",
        "if revision not in {None, session.revision}:",
        "if False:",
        (
            "tests/core/test_sessions.py::test_a_turn_rendered_from_a_history_of_before_does_not_start",
            "tests/http/test_recall.py::test_a_history_that_has_changed_meanwhile_is_asked_for",
        ),
    ),
    Mutant(
        "server_ext/http/conductor.py",
        "                self.recall.forget(caller.key)\n",
        "                pass\n",
        (
            "tests/http/test_recall.py::test_an_owner_s_own_change_is_known",
            "tests/http/test_recall.py::test_a_session_that_ends_while_its_turn_does_is_not_remembered",
        ),
    ),
    Mutant(
        "server_ext/http/conductor.py",
        "own = replace(request, messages=copy.deepcopy(request.messages))",
        "own = request",
        ("tests/http/test_recall.py::test_what_is_rendered_twice_is_rendered_from_what_was_sent",),
    ),
    Mutant(
        "server_ext/http/turn.py",
        "        plan.record.cut(plan.num_kept)\n",
        "",
        ("tests/http/test_recall.py::test_what_is_recalled_is_what_the_home_has",),
    ),
    Mutant(
        "server_ext/http/recall.py",
        "session is not None and turn in {None, session.turn + 1}",
        "session is not None",
        (
            "tests/http/test_recall.py::test_a_record_is_taken_once",
            "tests/http/test_recall.py::test_a_repetition_is_the_home_s_business",
        ),
    ),
    Mutant(
        "server_ext/http/conductor.py",
        "report = await said.settle(dict(total.completion()))",
        "report = (await said.settle(dict(total.completion()))) and {}",
        (f"{ROUTES}::test_a_stream",),
    ),
    Mutant(
        "server_ext/http/metrics.py",
        "        self._turns.labels(cache.outcome, cache.reason).inc()\n",
        "",
        ("tests/http/test_metrics.py::test_a_turn_is_counted_by_its_outcome",),
    ),
    # Numbers and lines: what is not counted is not zero, and what happens to a pin is told.
    Mutant(
        "server_ext/core/holdings.py",
        '            log_transition("drop pin", turn.key, num_blocks=len(turn.pin.block_ids), reason=reason)\n',
        "",
        ("tests/core/test_journal.py::test_what_becomes_of_a_pin_is_logged_too",),
    ),
    Mutant(
        "server_ext/core/holdings.py",
        '            log_transition("clip pin", lease.key, num_blocks=num_kept, reason="lease_revoked")\n',
        "",
        ("tests/core/test_journal.py::test_what_becomes_of_a_pin_is_logged_too",),
    ),
    Mutant(
        "server_ext/core/holdings.py",
        'self.counts.add(metrics.DROPPED_PINS, reason or "abandoned")',
        'self.counts.add(metrics.DROPPED_PINS, "abandoned")',
        ("tests/core/test_metrics.py::test_a_pin_that_is_dropped_is_counted_by_its_reason",),
    ),
    Mutant(
        "tests/engine/common.py",
        "    if not values:\n",
        "    if False:\n",
        ("tests/bench/test_soak.py::test_what_an_engine_does_not_count_is_not_zero",),
    ),
    Mutant(
        "bench/_pressure_arms.py",
        "        if not values:\n",
        "        if False:\n",
        ("tests/bench/test_pressure.py::test_what_our_engines_do_not_count_is_not_zero",),
    ),
    Mutant(
        "server_ext/core/metrics.py",
        "series += [(list(known), 0.0) for known in metric.known or ((),) if list(known) not in seen]",
        "pass",
        ("tests/engine/test_metrics.py::test_an_idle_engine_that_holds_a_lease_serves_every_metric",),
    ),
    Mutant(
        "bidikv_sdk/_keeper.py",
        "self._due_s = started_s + self._interval_s",
        'self._due_s = float("inf")',
        ("tests/sdk/test_keeper.py::test_a_hold_outlives_many_ttls", "tests/engine/test_sdk.py::test_a_session"),
    ),
    Mutant(
        "bidikv_sdk/_state.py",
        "        except SessionNotFound:\n            if not state.turn:\n                raise\n",
        "        except SessionNotFound:\n            raise\n",
        ("tests/sdk/test_session.py::test_a_lost_session_is_opened_again_by_the_next_turn",),
    ),
    # Rendering.
    Mutant(
        "server_ext/http/render.py",
        "            and whole.startswith(before)\n",
        "",
        (
            f"{RENDER}::test_reasoning_that_the_template_strips_leaves_the_prompt",
            "tests/http/test_divergence.py::test_each_family_says_what_it_rewrites",
        ),
    ),
    # What a lease is worth, kept for a second.
    Mutant(
        "server_ext/core/policy.py",
        "if lease not in ranked and len(lease.block_ids) == num_blocks:",
        "if lease not in ranked:",
        ("tests/core/test_policy.py::test_what_was_taken_from_a_lease_counts_at_once",),
    ),
    Mutant(
        "server_ext/core/policy.py",
        "                ranked.discard(lease)\n",
        "",
        ("tests/core/test_policy.py::test_a_call_that_goes_on_hides_nothing_from_the_next",),
    ),
    Mutant(
        "server_ext/core/policy.py",
        "if due_s != lease.due_s or num_blocks != len(lease.block_ids):",
        "if False:",
        ("tests/core/test_policy.py::test_values_are_kept_for_a_second_unless_a_lease_changes",),
    ),
    # P's hold on what it has computed for D.
    Mutant(
        "server_ext/engine/worker.py",
        "return self._holds.is_over(remote.request_id, end_s, now_s=now_s)",
        "return False",
        (
            f"{HOLDS}::test_a_read_after_the_hold_is_failed",
            f"{HOLDS}::test_the_worker_counts_the_heartbeats_that_go_out",
            "tests/engine/test_faults.py::test_what_p_may_have_given_away_is_not_relied_on",
        ),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "self._holds.sent(self._heard_of, waited_for=waited_for, now_s=now_s)",
        "waited_for = list(waited_for)\n            self._holds.sent(waited_for, waited_for=waited_for, now_s=now_s)",
        (
            f"{HOLDS}::test_the_worker_counts_the_heartbeats_that_go_out",
            f"{HOLDS}::test_a_heartbeat_that_nixl_refuses_does_not_count",
        ),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "offset_s += (time.perf_counter() - started_s) / 2",
        "pass",
        (f"{HOLDS}::test_the_other_clock_is_never_taken_for_later_than_it_is",),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "if end_s == graced.get(req_id):",
        "if False:",
        (f"{HOLDS}::test_a_grace_is_given_once",),
    ),
    Mutant(
        "server_ext/http/prefill_route.py",
        'REQUEST_PREFIX + _UNSAFE.sub("-", request_id)',
        "request_id",
        ("tests/http/test_prefill_client.py::test_no_name_of_a_callers_means_anything_between_engines",),
    ),
    Mutant(
        "server_ext/http/prefill_client.py",
        'str(params["remote_request_id"]).startswith(REQUEST_PREFIX)',
        "True",
        ("tests/http/test_prefill_client.py::test_a_malformed_answer_is_none",),
    ),
    # New weights in the middle of a turn.
    Mutant(
        "server_ext/engine/decode.py",
        'if params is not None and params.get("bidikv_fingerprint") != self.identity.fingerprint:',
        "if False:",
        ("tests/scheduler/test_leases_in_the_scheduler.py::test_what_p_computed_under_other_weights_is_not_read",),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        "if read.fingerprint != self.identity.fingerprint:",
        "if False:",
        (f"{READS}::test_a_ticket_is_not_read_under_new_weights",),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        'self.identity.fingerprint if read.fingerprint == self.identity.fingerprint else ""',
        "self.identity.fingerprint",
        (f"{READS}::test_an_answer_of_two_weights_is_of_none",),
    ),
    Mutant(
        "server_ext/engine/worker.py",
        "if now_s - self._reaped_s > self._holds.margin_s:",
        "if False:",
        (f"{HOLDS}::test_a_p_that_stood_still_keeps_its_blocks_a_little_longer",),
    ),
    Mutant(
        "server_ext/engine/holds.py",
        "if sent_s + self.margin_s <= end_s:",
        "if True:",
        (
            f"{HOLDS}::test_a_heartbeat_that_may_have_come_too_late_moves_nothing",
            f"{HOLDS}::test_a_pause_ends_it_for_good",
        ),
    ),
    Mutant(
        "server_ext/engine/holds.py",
        "end_s = max(end_s, sent_s + self._extension_s)",
        "pass",
        (f"{HOLDS}::test_heartbeats_keep_it_as_long_as_they_go_out",),
    ),
    Mutant(
        "server_ext/engine/prefill.py",
        'params["remote_blocks_expiry_time"] = self._reqs_need_send.get(request.request_id)',
        "pass",
        (f"{READS}::test_the_answer_says_until_when_p_keeps_its_blocks",),
    ),
    Mutant(
        "server_ext/http/prefill_client.py",
        "(hold_s >= self._least_hold_s, ",
        "(hold_s >= 0, ",
        ("tests/http/test_prefill_client.py::test_a_malformed_answer_is_none",),
    ),
    Mutant(
        "server_ext/http/render.py",
        "if told_options == options:",
        "if told_options:",
        (f"{RENDER}::test_an_option_that_writes_before_the_reply_is_not_left_out",),
    ),
    Mutant(
        "server_ext/http/render.py",
        "            _hash(prompt, told_options) == history.prompt_hash\n            and before",
        "            before",
        (f"{RENDER}::test_new_tools_are_in_the_prompt", f"{RENDER}::test_an_unknown_earlier_prompt_is_rendered_afresh"),
    ),
    Mutant(
        "server_ext/http/render.py",
        "        if not appends:\n            return None\n",
        "",
        (
            f"{RENDER}::test_the_check_at_start_tells_which_templates_append",
            f"{RENDER}::test_a_template_that_does_not_append_is_rendered_afresh",
        ),
    ),
    Mutant(
        "server_ext/http/render.py",
        "if history.token_ids else None",
        "if False else None",
        (
            f"{RENDER}::test_reasoning_goes_on_in_a_tool_loop",
            f"{RENDER}::test_any_ids_are_kept_as_generated",
            f"{RENDER}::test_a_template_that_appends_continues_exactly",
        ),
    ),
    Mutant(
        "server_ext/http/render.py",
        "rest = history.pending_text + closing + whole[len(before) :]",
        "rest = history.pending_text + whole[len(before) :]",
        (f"{RENDER}::test_any_text_continues_rightly",),
    ),
    Mutant(
        "server_ext/http/render.py",
        "        with vllm_errors():\n            # Before vLLM's",
        "        if True:\n            # Before vLLM's",
        (f"{RENDER}::test_a_template_that_fails_is_a_refusal",),
    ),
    Mutant(
        "server_ext/http/transcript.py",
        "before = self._replaced or self._chunks",
        "before = self._chunks",
        ("tests/http/test_divergence.py::test_the_cause_of_a_divergence_is_named",),
    ),
)


def runnable(mutant: Mutant, *, engines: bool) -> list[str]:
    """Return the tests of a mutant that need engines, or those that need none."""
    return [test for test in mutant.tests if test.startswith("tests/engine/") == engines]


def surviving(mutant: Mutant, tree: Path, *, engines: bool) -> list[str]:
    """Return the tests that pass without a guard; put it back."""
    path = tree / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.guard) != 1:
        msg = f"{mutant.file} has {text.count(mutant.guard)} times {mutant.guard!r}; a guard stands there once"
        raise SystemExit(msg)
    tests = runnable(mutant, engines=engines)
    path.write_text(text.replace(mutant.guard, mutant.without), "utf-8")
    try:
        told = run(tests, tree, LONGEST_WITH_ENGINES_S if engines else LONGEST_S)
    finally:
        path.write_text(text, "utf-8")
    failed = re.findall(r"^FAILED (\S+?)(?:\[| |$)", told, re.MULTILINE)
    return [test for test in tests if test not in failed]


def preload() -> None:
    """Import what tests import and mutants do not touch: half a minute for each of them otherwise."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        for name in ("hypothesis", "httpx", "vllm.v1.core.sched.async_scheduler", *PRELOADED):
            importlib.import_module(name)


def run(tests: list[str], tree: Path, longest_s: float) -> str:
    """Return what pytest prints of some tests in a copy of the tree, in a fork of this process."""
    with tempfile.TemporaryFile("w+") as output:
        process_id = os.fork()
        if not process_id:
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(tree)
                os.environ["PYTHONPATH"] = str(tree)  # for what tests start
                sys.path.insert(0, str(tree))
                pytest.main([*OPTIONS, f"--basetemp={tree}/tmp", *tests])
            except BaseException:  # noqa: BLE001 (the rest of this program is the parent's)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        # Asked first, so that it can end what it has started.
        signals = [(longest_s, signal.SIGINT), (longest_s + 60, signal.SIGKILL)]
        started_s = time.monotonic()
        while os.waitpid(process_id, os.WNOHANG) == (0, 0):
            if signals and time.monotonic() - started_s > signals[0][0]:
                os.kill(process_id, signals.pop(0)[1])
            time.sleep(0.05)
        output.seek(0)
        return output.read()


def say(text: str) -> None:
    """Print at once, for a run takes minutes."""
    print(text, flush=True)  # noqa: T201 (a script prints)


def main() -> int:
    """Run the mutants; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of tests, or of files that have guards")
    parser.add_argument("--engines", action="store_true", help="the tests that need engines, in place of the others")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.names or any(n in t for n in asked.names for t in (m.file, *m.tests))]
    chosen = [mutant for mutant in chosen if runnable(mutant, engines=asked.engines)]
    num_seen, survivors = 0, []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".venv*"))
            else:
                shutil.copy(source, tree / name)
        preload()
        for number, mutant in enumerate(chosen, 1):
            survived = surviving(mutant, tree, engines=asked.engines)
            survivors += survived
            num_seen += len(runnable(mutant, engines=asked.engines)) - len(survived)
            told = [f"{number}/{len(chosen)} {mutant.file}: {mutant.guard.strip().splitlines()[0]:.70}"]
            say("\n".join(told + [f"    SURVIVED {test}" for test in survived]))
    say(f"\n{num_seen} tests failed without their guards, {len(survivors)} did not")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
