"""What D's connector adds to a step of vLLM's scheduler: its own hooks and its guard, on nothing of vLLM's.

`make_step` returns a step with them, and one without, which is what calling alone costs. Imports vLLM, which takes
seconds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from server_ext.core.rates import LearnedRates
from server_ext.core.steps import StepWatch
from server_ext.engine import compat
from server_ext.engine.decode import DecodeScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from server_ext.core.home import Home


class _Manager:
    """vLLM's cache manager where every running request has room in its last block."""

    block_pool = None

    def allocate_slots(  # noqa: PLR0913, PLR0917 (vLLM's own parameters, which the guard compares)
        self,
        request: Any,
        num_new_tokens: int,  # noqa: ARG002
        num_new_computed_tokens: int = 0,  # noqa: ARG002
        new_computed_blocks: Any = None,  # noqa: ARG002
        num_lookahead_tokens: int = 0,  # noqa: ARG002
        num_external_computed_tokens: int = 0,  # noqa: ARG002
        delay_cache_blocks: bool = False,  # noqa: ARG002, FBT001, FBT002
        num_encoder_tokens: int = 0,  # noqa: ARG002
        full_sequence_must_fit: bool = False,  # noqa: ARG002, FBT001, FBT002
        reserved_blocks: int = 0,  # noqa: ARG002
        has_scheduled_reqs: bool = True,  # noqa: ARG002, FBT001, FBT002
        skip_zeroing_group_ids: tuple[int, ...] = (),  # noqa: ARG002
    ) -> Any:
        """Return something, as where there is room."""
        return request

    def reset_prefix_cache(self) -> bool:
        """Return True, as where nothing is held."""
        return True


class _Stock(compat.NixlPullConnectorScheduler):  # type: ignore[misc] # vLLM's names are Any to mypy
    """NIXL's scheduler side with all hooks of a step empty: behind ours, it leaves our part alone."""

    def __init__(self) -> None:
        """Need no configuration."""

    def on_new_request(self, request: Any) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """Do nothing."""

    def update_connector_output(self, connector_output: Any) -> None:
        """Do nothing."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Hold nothing."""
        return False, None


class _Ours(DecodeScheduler, _Stock):
    """D's scheduler side over `_Stock`: its `super()` is that.

    Args:
        home: of its sessions.
        manager: gets the guard.
    """

    def __init__(self, home: Home, manager: Any) -> None:
        _Stock.__init__(self)
        self._home = home
        self._steps = StepWatch(LearnedRates())
        self._settings: Any = SimpleNamespace(secret=b"")
        compat.guard_allocations(manager, self._make_room, self._before_reset)


def make_step(home: Home, num_running: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a step of D's scheduler as our connector sees it, and the same one with neither connector nor guard.

    All but one of the requests generate a token, and one is a piece of a prompt. None is a turn's: one of them is new,
    another one ends, and of tickets there is no news.
    """
    manager = _Manager()
    ours = _Ours(home, manager)
    return _step(ours, manager, num_running), _step(_Stock(), _Manager(), num_running)


def _step(connector: Any, manager: Any, num_running: int) -> Callable[[], None]:
    requests = [
        SimpleNamespace(request_id=f"chatcmpl-{i}", session_id=None, kv_transfer_params=None, num_new_tokens=1)
        for i in range(num_running)
    ]
    requests[-1].num_new_tokens = 256
    num_tokens = {request.request_id: request.num_new_tokens for request in requests}
    scheduled = SimpleNamespace(num_scheduled_tokens=num_tokens)
    answered = SimpleNamespace(kv_connector_worker_meta=None)

    def step() -> None:
        connector.on_new_request(requests[-1])
        for request in requests:
            manager.allocate_slots(request, 1, num_lookahead_tokens=0)
        connector.build_connector_meta(scheduled)
        connector.update_connector_output(answered)
        connector.request_finished(requests[0], ([],))

    return step
