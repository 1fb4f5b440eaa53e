"""`bidikv rates` on real engines."""

import json

from typer.testing import CliRunner

from server_ext.cli._app import app
from server_ext.simulation.rates import read_rates

from .rig import Rig


def test_the_rates_of_running_engines_are_measured(rig: Rig, tmp_path) -> None:
    """The file that it writes is read by the simulator, with the pool, the context and times that are not nothing."""
    path = tmp_path / "rates.json"
    model = f"{rig.stack.config.model}/config.json"
    arguments = ["rates", "--url", rig.stack.url, "--model", model, "--max-tokens", "600", "--out", str(path)]
    said = CliRunner().invoke(app, arguments, env={"NO_PROXY": "127.0.0.1"})
    assert said.exit_code == 0, said.output
    rates = read_rates(path)
    pool = rig.pool()
    assert rates.pool_tokens == pool["total_blocks"] * 32
    assert rates.decode_step_s > 0
    assert rates.prefill_s_per_token > 0
    assert rates.prefill_s(600) > rates.prefill_s(100)
    samples = json.loads(path.read_text())["samples"]
    assert len(samples["turns"]) == 11
    assert sum(turn["fetched_tokens"] > 0 for turn in samples["turns"]) == 6
    assert "tokens/s" in said.stdout

    simulated = CliRunner().invoke(
        app, ["simulate", "--rates", str(path), "--sessions", "5", "--concurrent", "2", "--json", "-", "--quiet"]
    )
    assert simulated.exit_code == 0, simulated.output
    assert json.loads(simulated.stdout)["cells"][0]["results"]["num_turns"] > 0
