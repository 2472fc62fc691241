"""The parallel layout, and every reason why a model or a machine cannot take it, at once.

Whether a degree cuts a sum where the contract allows it is asked of `schema`, never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .profiles import ModelProfile
from .schema import get_contract, row_reduction, vocabulary_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees: tensor parallel in the rollout, and tensor, pipeline and context in the trainer."""

    rollout_tp: int = 1
    train_tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def train_world_size(self) -> int:
        """Trainer ranks: the exact product (there is no data-parallel remainder to absorb)."""
        return self.train_tp * self.pp * self.cp

    def gpus(self, colocate: bool, num_engines: int = 1) -> int:
        """GPUs in use: both roles on the same ones, or each on its own."""
        rollout, world = self.rollout_tp * num_engines, self.train_world_size
        return max(rollout, world) if colocate else rollout + world


class LayoutError(ValueError):
    """An impossible layout; `violations` holds every reason, each with numbers and a remedy."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = tuple(violations)
        count = f"{len(violations)} reason{'s' if len(violations) > 1 else ''}"
        super().__init__(f"impossible layout ({count}): " + "; ".join(violations))


def validate(
    layout: Layout,
    profile: ModelProfile,
    contract: str,
    segments: int,
    *,
    num_gpus: int | None = None,
    colocate: bool = True,
    num_engines: int = 1,
) -> None:
    """Raise `LayoutError` listing all violations.

    `contract` is a registry name, `segments` the resolved S. `num_gpus` is the number that the
    run may use; `None` where there is nothing to count (a CPU, or a cluster seen only later).
    """
    degrees = {
        "--rollout-tp": layout.rollout_tp,
        "--train-tp": layout.train_tp,
        "--pp": layout.pp,
        "--cp": layout.cp,
    }
    violations = [f"{flag}={n} must be 1 or more" for flag, n in degrees.items() if n < 1]
    if violations:
        # Nothing below means anything with a degree of zero.
        raise LayoutError(violations)
    violations += _tensor_parallel_sizes(layout, contract)
    violations += _heads(layout, profile)
    violations += _widths(layout, profile)
    violations += _row_sums(layout, profile, contract, segments)
    violations += _vocabulary(layout, profile, contract)
    if profile.num_hidden_layers % layout.pp:
        violations.append(
            f"num_hidden_layers={profile.num_hidden_layers} is not divisible by --pp={layout.pp}; "
            f"choose --pp from {_divisors(profile.num_hidden_layers, 8)}"
        )
    violations += _gpus(layout, num_gpus, colocate, num_engines)
    if violations:
        raise LayoutError(violations)


def _divisors(number: int, limit: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, limit) + 1) if number % n == 0)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _sides(layout: Layout) -> tuple[tuple[str, int], ...]:
    return (("--rollout-tp", layout.rollout_tp), ("--train-tp", layout.train_tp))


def _tensor_parallel_sizes(layout: Layout, contract: str) -> list[str]:
    largest = get_contract(contract).row_linear.max_tensor_parallel_size
    allowed = ", ".join(str(n) for n in range(1, largest + 1) if _is_power_of_two(n))
    return [
        f"{flag}={tp} is not a power of two up to {largest}, so the ranks form no balanced tree; "
        f"choose from {allowed}"
        for flag, tp in _sides(layout)
        if not _is_power_of_two(tp) or tp > largest
    ]


def _heads(layout: Layout, profile: ModelProfile) -> list[str]:
    heads, kv_heads = profile.num_attention_heads, profile.num_key_value_heads
    cuts = [("--rollout-tp", layout.rollout_tp), ("--train-tp", layout.train_tp)]
    if layout.cp > 1:
        # Ulysses turns the context cut into a cut over heads.
        cuts.append(("--train-tp x --cp", layout.train_tp * layout.cp))
    violations = []
    for flag, ranks in cuts:
        if heads % ranks:
            violations.append(
                f"attention: num_attention_heads={heads} is not divisible by {flag}={ranks}; "
                f"choose from {_divisors(heads, 64)}"
            )
        if kv_heads % ranks and ranks % kv_heads:
            violations.append(
                f"attention: num_key_value_heads={kv_heads} can be neither divided over nor "
                f"replicated to {flag}={ranks} ranks; use a divisor or a multiple of {kv_heads}"
            )
    return violations


def _widths(layout: Layout, profile: ModelProfile) -> list[str]:
    width = profile.intermediate_size
    return [
        f"gate_up_proj: intermediate_size={width} is not divisible by {flag}={tp}; "
        f"choose from {_divisors(width, 8)}"
        for flag, tp in _sides(layout)
        if width % tp
    ]


def _segment_choices(contract: str) -> list[int]:
    largest = get_contract(contract).row_linear.max_segments
    return [n for n in range(1, largest + 1) if _is_power_of_two(n)]


def _row_sums(layout: Layout, profile: ModelProfile, contract: str, segments: int) -> list[str]:
    rule = get_contract(contract).row_linear
    largest = rule.max_tensor_parallel_size
    sides = [(f, tp) for f, tp in _sides(layout) if _is_power_of_two(tp) and tp <= largest]
    # A size that the contract refuses outright has no order to ask the schema for.
    violations = [
        f"{layer}: K={k_global} is not divisible by {flag}={tp}"
        for layer, k_global in profile.row_parallel_layers
        for flag, tp in _sides(layout)
        if (flag, tp) not in sides and k_global % tp
    ]
    if rule.order == "segments" and segments not in _segment_choices(contract):
        if segments != max(layout.rollout_tp, layout.train_tp):
            listed = ", ".join(map(str, _segment_choices(contract)))
            violations.append(f"--segments={segments} must be a power of two; choose from {listed}")
        # Otherwise it follows from a tensor-parallel size that is reported already.
        return violations
    if layout.rollout_tp not in [tp for _, tp in sides]:
        # The rollout fixes the order; without one there is nothing for the trainer to fit into.
        return violations
    for layer, k_global in profile.row_parallel_layers:
        for flag, tp in sides:
            reason = _row_refusal(contract, k_global, layout.rollout_tp, tp, segments)
            if reason:
                remedy = _row_remedy(layout, contract, k_global)
                violations.append(f"{layer} at {flag}={tp}: {reason}; {remedy}")
    return violations


def _row_refusal(
    contract: str, k_global: int, rollout_tp: int, tp: int, segments: int
) -> str | None:
    """Why a side with `tp` ranks cannot follow the order that the rollout fixes, or None."""
    try:
        row_reduction(contract, k_global, rollout_tp=rollout_tp, segments=segments).leaves_per_rank(
            tp
        )
    except ValueError as error:
        return str(error)
    return None


def _row_remedy(layout: Layout, contract: str, k_global: int) -> str:
    """What to change, found by asking the schema about the alternatives."""
    if get_contract(contract).row_linear.order == "segments":
        works = [
            str(s)
            for s in _segment_choices(contract)
            if not any(
                _row_refusal(contract, k_global, layout.rollout_tp, tp, s)
                for _, tp in _sides(layout)
            )
        ]
        if works:
            return f"choose --segments from {', '.join(works)}"
        return "lower the tensor-parallel size"
    works = [
        str(tp)
        for tp in (1, 2, 4, 8)
        if not _row_refusal(contract, k_global, layout.rollout_tp, tp, 1)
    ]
    if works:
        return f"with --rollout-tp={layout.rollout_tp} choose --train-tp from {', '.join(works)}"
    return "lower --rollout-tp"


def _vocabulary(layout: Layout, profile: ModelProfile, contract: str) -> list[str]:
    if get_contract(contract).logprob.order == "gather":
        # The shards are gathered and cut to the real size: how they were padded adds nothing.
        return []
    table = vocabulary_segments(contract, profile.vocab_size)
    try:
        table.shard(layout.train_tp, 0)
    except ValueError as error:
        choices = _divisors(table.num_segments, table.num_segments)
        return [f"lm_head: {error}; choose --train-tp from {choices}"]
    return []


def _gpus(layout: Layout, num_gpus: int | None, colocate: bool, num_engines: int) -> list[str]:
    if num_gpus is None:
        return []
    needed = layout.gpus(colocate, num_engines)
    if needed <= num_gpus:
        return []
    world = (
        f"train_tp x pp x cp = {layout.train_tp} x {layout.pp} x {layout.cp} = "
        f"{layout.train_world_size}"
    )
    rule = "the larger of" if colocate else "the sum of"
    engines = f" x {num_engines} engines" if num_engines > 1 else ""
    return [
        f"world size: needs {needed} GPUs ({rule} rollout_tp={layout.rollout_tp}{engines} and "
        f"{world}), "
        f"{num_gpus} available; lower a degree, or join a larger cluster with RAY_ADDRESS"
    ]
