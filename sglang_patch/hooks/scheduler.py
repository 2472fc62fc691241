"""`sglang.srt.managers.scheduler.Scheduler`: where a rank takes up its contract, and reports it.

SGLang logs and skips a plugin that raises, so a rank that serves a contract must say so itself:
`get_internal_state` (behind `Engine.get_server_info()`) carries every rank's readback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import state
from ..contracts import policy_for
from ..readback import gather_readbacks, update_weights_digest
from ..taps import save_taps, start_taps
from .target import Hook

READBACK_KEY = "true_on_policy"
DIGEST_RPC = "true_on_policy_update_weights_digest"
START_TAPS_RPC = "true_on_policy_start_taps"
SAVE_TAPS_RPC = "true_on_policy_save_taps"


def init(
    original: Callable[..., None], self: Any, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """Activate the policy before the model is built; any violation ends this rank."""
    state.activate(policy_for(server_args))
    original(self, server_args, *args, **kwargs)


def internal_state(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """SGLang's internal state with the readback of every tensor-parallel rank."""
    out = original(self, recv_req)
    out.internal_state[READBACK_KEY] = gather_readbacks(self)
    return out


def add_rpcs() -> None:
    """Methods for `Engine.collective_rpc`, which answers only with success: the digest itself
    then comes with the next readback, and what taps recorded in files."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, DIGEST_RPC, update_weights_digest)
    setattr(Scheduler, START_TAPS_RPC, start_taps)
    setattr(Scheduler, SAVE_TAPS_RPC, save_taps)


HOOKS = (
    Hook(
        name="scheduler",
        target="sglang.srt.managers.scheduler.Scheduler.__init__",
        checked="sglang.srt.managers.scheduler.run_scheduler_process",
        digest="932c4889e7591698",
        replacement=init,
        always=True,
    ),
    Hook(
        name="internal_state",
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        digest="91851662bc4609fd",
        replacement=internal_state,
    ),
)
