"""What engines and links take, in seconds: from hardware constants (`from_limits`) or measured (`read_rates`).

The one description of speed that a simulation knows. A file of measured rates is what `bidikv rates` writes.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from server_ext.analysis.hardware import Gpu, Link, Model
from server_ext.analysis.limits import Limits

FORMAT: Final = "bidikv-rates"
VERSION: Final = 1
"""Of the file.

1. The first version.
"""
_ANY_PARAMS: Final = 1e12
_LEAST_S: Final = 1e-12
"""In place of times that were too short to be seen, where they are divided by."""
_CONTROL_S: Final = 0.010
"""Rendering and beginning a turn on an idle decode engine: 5 to 10 ms where it was measured."""
_STEP_TOKENS: Final = 8192
"""Most tokens of a step that also prefills; vLLM's default on such GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRates:
    """Every engine of a fleet is alike, and so is every link."""

    model: str
    source: str
    """Where the numbers are from."""
    kv_bytes_per_token: int
    max_context_tokens: int
    pool_tokens: int
    """Tokens whose KV fits on one engine."""
    step_tokens: int
    """Most tokens that a step of a decode engine prefills."""
    prefill_step_tokens: int
    """Most tokens of a prefill engine's step."""
    control_s: float
    """Before a prompt is on its way: rendering, and the calls to the home of the session."""
    prefill_fixed_s: float
    """Of every prefill, however little it computes."""
    prefill_least_s: float
    """No prefill takes less: it reads all weights once."""
    prefill_s_per_token: float
    """Of a short prompt."""
    attention_tokens: float
    """Length at which attention costs as much as the weights."""
    fetch_fixed_s: float
    fetch_s_per_token: float
    handover_fixed_s: float
    """From the end of a prefill to the decode engine's first step of it, transfer and step aside."""
    handover_s_per_token: float
    decode_step_s: float
    """Of one sequence."""
    decode_s_per_sequence: float
    """Of each further one."""
    decode_s_per_context_token: float
    """Of each token that the running sequences attend to."""
    prefill_slowdown: float = 1.0
    """How many times as long a prefill takes while the decode engine beside it decodes; 1 where they share nothing."""
    decode_slowdown: float = 1.0
    """The same of a decode step while the prefill engine beside it computes."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type in {"str", str}:
                is_good = isinstance(value, str)
            else:
                is_good = type(value) in {int, float} and math.isfinite(value) and value >= 0
            if not is_good or (one.name in _POSITIVE and value <= 0):
                msg = f"rates: {one.name} is {value!r}; give a number, 0 or more, and above 0 for {_POSITIVE_TEXT}"
                raise ValueError(msg)

    def prefill_s(self, num_tokens: int, num_present: int = 0) -> float:
        """Return the seconds to compute a prompt of `num_tokens`, the first `num_present` of which are there."""
        work = num_tokens - num_present + (num_tokens * num_tokens - num_present * num_present) / self.attention_tokens
        return max(self.prefill_least_s, self.prefill_fixed_s + self.prefill_s_per_token * work)

    @property
    def step_least_s(self) -> float:
        """What a step of a prefill engine takes however little it computes: prompts in one step share it."""
        return max(self.prefill_least_s, self.prefill_fixed_s)

    def step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Return the seconds of a decode step of so many sequences, at least one."""
        return (
            self.decode_step_s
            + self.decode_s_per_sequence * (num_sequences - 1)
            + self.decode_s_per_context_token * context_tokens
        )

    control_steps: float = 1.5
    """Steps of a decode engine that runs, for which a turn's calls wait: half of one, and then a whole one."""
    handover_steps: float = 1.5
    """The same between a hand-over and the step that makes the first token: the read is posted with a step, and that
    it has ended is seen at that step's end."""

    @property
    def shares_machines(self) -> bool:
        """Whether a prefill and a decode engine take each other's time."""
        return self.prefill_slowdown != 1 or self.decode_slowdown != 1

    def to_json(self) -> dict[str, Any]:
        """Return the object of the file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def to_limits(self) -> Limits:
        """Return the limit model with the same prefill, fetch, decode step and pool, for what asks no more.

        The hardware in it is made up so that these come out; only its bytes and seconds mean something.
        """
        params, weight_bytes = _ANY_PARAMS, 2 * _ANY_PARAMS
        model = Model(
            name=self.model,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_active_params=params,
            num_layers=1,
            attention_dim=max(1, round(params / self.attention_tokens)),
            weight_bytes=weight_bytes,
            max_context_tokens=self.max_context_tokens,
            source=self.source,
        )
        gpu = Gpu(
            name="measured",
            peak_flops=2 * params / self.prefill_s_per_token,
            # Half a token more, against rounding.
            memory_bytes=(self.pool_tokens + 0.5) * self.kv_bytes_per_token + weight_bytes,
            memory_bytes_per_s=weight_bytes / self.decode_step_s,
            source=self.source,
        )
        speed = self.kv_bytes_per_token / max(self.fetch_s_per_token, _LEAST_S)
        link = Link(name="measured", bytes_per_s=speed, source=self.source)
        fixed_s = max(self.fetch_fixed_s, _LEAST_S)
        return Limits(model, gpu, link, fixed_s, efficiency=1.0, engine_gpus=1, memory_share=1.0)


_POSITIVE: Final = frozenset(
    {"kv_bytes_per_token", "max_context_tokens", "pool_tokens", "step_tokens", "prefill_step_tokens"}
    | {"prefill_s_per_token", "attention_tokens", "decode_step_s", "prefill_slowdown", "decode_slowdown"}
)
_POSITIVE_TEXT: Final = ", ".join(sorted(_POSITIVE))


def from_limits(limits: Limits) -> FleetRates:
    """Return the rates of hardware constants."""
    context_s = limits.model.kv_bytes_per_token / (limits.num_gpus * limits.gpu.memory_bytes_per_s)
    return FleetRates(
        model=limits.model.name,
        source=f"{limits.num_gpus} x {limits.gpu.name} per engine at {limits.efficiency:.0%}, {limits.link.name}",
        kv_bytes_per_token=limits.model.kv_bytes_per_token,
        max_context_tokens=limits.model.max_context_tokens,
        pool_tokens=limits.pool_tokens,
        step_tokens=_STEP_TOKENS,
        prefill_step_tokens=_STEP_TOKENS,
        control_s=_CONTROL_S,
        prefill_fixed_s=0.0,
        prefill_least_s=limits.decode_s_per_token,
        prefill_s_per_token=limits.linear_s_per_token,
        attention_tokens=limits.attention_tokens,
        fetch_fixed_s=limits.fixed_s,
        fetch_s_per_token=limits.fetch_s_per_token,
        handover_fixed_s=limits.fixed_s,
        handover_s_per_token=limits.fetch_s_per_token,
        decode_step_s=limits.decode_s_per_token,
        decode_s_per_sequence=limits.linear_s_per_token,
        decode_s_per_context_token=context_s,
    )


def read_rates(path: Path) -> FleetRates:
    """Return the rates of a file that `bidikv rates` wrote.

    Raises:
        ValueError: it cannot be read, or is no such file; the text names it and what is wrong.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        msg = f"--rates {path}: cannot be read ({error}); write it with `bidikv rates`"
        raise ValueError(msg) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        msg = f"--rates {path}: not a file of rates, version {VERSION}; write it with `bidikv rates`"
        raise ValueError(msg)
    names = [one.name for one in fields(FleetRates)]
    missing = [name for name in names if name not in data]
    if missing:
        msg = f"--rates {path}: {', '.join(missing)} is missing; write it anew with `bidikv rates`"
        raise ValueError(msg)
    try:
        return FleetRates(**{name: data[name] for name in names})
    except ValueError as error:
        msg = f"--rates {path}: {error}"
        raise ValueError(msg) from error
