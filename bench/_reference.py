"""The judge of a soak: plain vLLM, without bidikv and without any cache, asked for every answer again.

`judge` is pure; `Reference` runs the engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from bench._plain_engine import PlainEngine
from server_ext.launch.command import engine_command
from server_ext.launch.tiny import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from server_ext.launch.command import StackConfig

NEAR_TIE: Final = 1e-3
"""Two tokens whose log-probabilities are this close change places by rounding, on any engine."""
_CALL_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Generated:
    """One token of the reference, and the log-probabilities of the likeliest ones."""

    token_id: int
    logprobs: dict[int, float]


@dataclass(frozen=True)
class Verdict:
    """How an answer compares."""

    num_wrong: int
    num_near_ties: int


def judge(
    prompt_ids: Sequence[int], answer_ids: Sequence[int], generate: Callable[[list[int], int], list[Generated]]
) -> Verdict:
    """Compare an answer, token by token, with what the reference generates behind the same prompt.

    Where two tokens are as likely as each other but for rounding, either is right, and the reference goes on behind
    the one of the answer.

    Args:
        prompt_ids: [num_prompt_tokens].
        answer_ids: [num_tokens].
        generate: returns so many tokens behind a prompt.
    """
    num_done = num_ties = 0
    while num_done < len(answer_ids):
        rest = answer_ids[num_done:]
        right = generate([*prompt_ids, *answer_ids[:num_done]], len(rest))
        place = next(
            (i for i, (ours, theirs) in enumerate(zip(rest, right, strict=True)) if ours != theirs.token_id), None
        )
        if place is None:
            break
        theirs = right[place]
        distance = theirs.logprobs[theirs.token_id] - theirs.logprobs.get(rest[place], float("-inf"))
        if distance > NEAR_TIE:
            return Verdict(sum(a != b.token_id for a, b in zip(rest, right, strict=True)), num_ties)
        num_ties += 1
        num_done += place + 1
    return Verdict(0, num_ties)


def generated(reply: Mapping[str, Any]) -> list[Generated]:
    """Return the tokens of a completion that was asked for with ids and log-probabilities."""
    (choice,) = reply["choices"]
    return [
        Generated(token_id, {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()})
        for token_id, likeliest in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)
    ]


class Reference:
    """A third engine: the same model, stock vLLM, no plugin, no prefix cache, no transfer."""

    def __init__(self, config: StackConfig, folder: Path, kv_cache_bytes: int) -> None:
        args = ("--max-model-len", str(config.max_model_len), "--kv-cache-memory-bytes", str(kv_cache_bytes))
        self._engine = PlainEngine(
            config.model,
            TINY,
            log_file=folder / "reference.log",
            args=(*args, "--no-enable-prefix-caching"),
            # The machine's own settings are those of the other two.
            env=engine_command(config, "prefill", os.environ).env,
        )
        self._http = httpx.Client(base_url=self._engine.url, timeout=_CALL_TIMEOUT_S, trust_env=False)

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._engine.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.__exit__(*exc_info)
        self._http.close()

    def wait_ready(self) -> None:
        """Return when it answers.

        Raises:
            StackError: it does not.
        """
        self._engine.wait_ready()

    def generate(self, prompt_ids: list[int], num_tokens: int) -> list[Generated]:
        """Return the tokens behind a prompt."""
        body = {
            "model": TINY,
            "prompt": prompt_ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return generated(self._post("/v1/completions", body))

    def prompt_ids(self, messages: Sequence[Any]) -> list[int]:
        """Return the prompt that stock vLLM renders for a whole history."""
        ids: list[int] = self._post("/tokenize", {"model": TINY, "messages": list(messages)})["tokens"]
        return ids

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self._http.post(path, json=body).raise_for_status().json()
        return reply
