"""`bidikv rates` on real engines, and what its file is for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from server_ext.cli._app import app
from server_ext.launch.tiny import TINY
from server_ext.simulation.rates import read_rates

from .common import BLOCK_BYTES, BLOCK_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from .rig import Rig


def invoke(*arguments: str | Path) -> Result:
    """Run a command that must succeed."""
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result


def test_rates_are_measured_and_used(wide: Rig, tmp_path: Path) -> None:
    """The engines' size is their own, times are times, and both `simulate` and `analyze` go by the file."""
    path, log = tmp_path / "rates.json", tmp_path / "log.jsonl"
    said = invoke("rates", "--url", wide.stack.url, "--max-tokens", "3000", "--out", path).stdout
    assert f"{TINY}: a pool of {wide.pool_blocks * BLOCK_SIZE:,} tokens" in said
    rates = read_rates(path)
    assert (rates.model, rates.max_context_tokens) == (TINY, wide.max_model_len)
    assert (rates.pool_tokens, rates.kv_bytes_per_token) == (
        wide.pool_blocks * BLOCK_SIZE,
        BLOCK_BYTES // BLOCK_SIZE,
    )
    samples = json.loads(path.read_text("utf-8"))["samples"]
    fetched = {one["fetched_tokens"] for one in samples["turns"]}
    # The longest history, with all of its answer that is in the cache.
    assert max(fetched) >= 3000 - BLOCK_SIZE
    assert rates.prefill_s(3000) > rates.prefill_s(300) > 0

    fleet = ("--sessions", "10", "--concurrent", "2", "--chunk", "64", "--quiet", "--json", "-")
    simulated = json.loads(invoke("simulate", "--rates", path, *fleet).stdout)
    assert simulated["rates"] == rates.to_json()
    assert simulated["cells"][0]["results"]["num_turns"] > 10

    ids = list(range(3000))
    lines = [{"timestamp": 1.7e9 + 10 * n, "session_id": "a", "prompt_token_ids": ids[: 1000 * n]} for n in (1, 2, 3)]
    log.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    analyzed = json.loads(invoke("analyze", log, "--rates", path, "--json", "-").stdout)
    assert analyzed["link"]["break_even_tokens"] == rates.to_limits().break_even_tokens
    assert [row["model"] for row in analyzed["link"]["table"]].count(TINY) > 0
