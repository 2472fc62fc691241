"""The order in which a row-parallel linear adds, as data, for any K and tensor-parallel size.

Kernels, the PyTorch reference, the trainer and the layout check all read this one description;
nobody derives the order a second time. A *leaf* is a range of the global K with one fp32
accumulator; an *association* is a nested pair of leaf numbers, `((0, 1), 2)` meaning
`(leaf0 + leaf1) + leaf2`. A rank of a tensor-parallel group owns consecutive leaves that form a
whole subtree, so the ranks only exchange subtree sums and finish the same tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, Union

from .contract import DType, get_contract

Association: TypeAlias = Union[int, "tuple[Association, Association]"]
Path = Literal["tiles", "rollout-partition", "segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReduction:
    """One row-parallel sum: `leaves[i]` is leaf i's range `[start, stop)` of the global K.

    `bias_ranks` says where the bias enters: it is added to the first of `bias_ranks` equal parts
    of K, once that part is summed and before the parts are added (1: at the root).
    """

    path: Path
    k_global: int
    leaves: tuple[tuple[int, int], ...]
    association: Association
    leaf_dtype: DType
    bias_ranks: int

    @property
    def num_leaves(self) -> int:
        return len(self.leaves)

    def leaves_per_rank(self, tensor_parallel_size: int) -> int:
        """Leaves that each rank owns; `ValueError` where a rank would own part of a leaf."""
        local_association(self, tensor_parallel_size)
        return self.num_leaves // tensor_parallel_size

    def bias_depth(self) -> int:
        """Number of additions between the bias and the root, along the left spine."""
        return self.bias_ranks.bit_length() - 1


def balanced(start: int, count: int) -> Association:
    """The balanced binary tree over `count` (a power of two) consecutive leaves from `start`."""
    assert count >= 1 and count & (count - 1) == 0, count
    if count == 1:
        return start
    half = count // 2
    return (balanced(start, half), balanced(start + half, half))


def _run(start: int, count: int) -> Association:
    node: Association = start
    for leaf in range(start + 1, start + count):
        node = (node, leaf)
    return node


def _tree_of_runs(start: int, runs: int, length: int) -> Association:
    if runs == 1:
        return _run(start, length)
    half = runs // 2
    return (
        _tree_of_runs(start, half, length),
        _tree_of_runs(start + half * length, half, length),
    )


def run_length(num_tiles: int) -> int:
    """Tiles added left to right before the binary tree starts (contract v1).

    Halve while the count is even and above two: the published SGLang kernel's order.
    """
    first = num_tiles
    while first > 2 and first % 2 == 0:
        first //= 2
    return first


def tile_order(num_tiles: int) -> Association:
    """Contract v1's association of `num_tiles` K tiles: runs, then a binary tree over the runs."""
    length = run_length(num_tiles)
    return _tree_of_runs(0, num_tiles // length, length)


def _check_power_of_two(what: str, value: int, largest: int) -> None:
    if value < 1 or value & (value - 1) or value > largest:
        raise ValueError(f"{what}={value} is not a power of two from 1 to {largest}")


def row_reduction(
    contract_name: str, k_global: int, *, rollout_tp: int = 1, segments: int = 8
) -> RowReduction:
    """The sum over `k_global` under a contract, as the rollout at `rollout_tp` performs it.

    v1 (`tiles`): 128-wide tiles when each rollout rank's K is a multiple of 128, otherwise
    (`rollout-partition`) one leaf per rollout rank. v2 (`segments`): `segments` equal leaves.
    Raises `ValueError` with the numbers when the contract cannot cut K this way.
    """
    rule = get_contract(contract_name).row_linear
    _check_power_of_two("tensor_parallel_size", rollout_tp, rule.max_tensor_parallel_size)
    if k_global < 1 or k_global % rollout_tp:
        raise ValueError(f"K={k_global} is not divisible by tensor_parallel_size={rollout_tp}")
    if rule.order == "segments":
        _check_power_of_two("segments", segments, rule.max_segments)
        if k_global % segments:
            raise ValueError(f"K={k_global} is not divisible by segments={segments}")
        if rollout_tp > segments:
            raise ValueError(
                f"tensor_parallel_size={rollout_tp} needs at least as many segments, "
                f"got segments={segments}"
            )
        path: Path = "segments"
        count, order = segments, balanced(0, segments)
    elif (k_global // rollout_tp) % rule.tile == 0:
        path, count = "tiles", k_global // rule.tile
        order = tile_order(count)
    else:
        path, count, order = "rollout-partition", rollout_tp, balanced(0, rollout_tp)
    width = k_global // count
    return RowReduction(
        path=path,
        k_global=k_global,
        leaves=tuple((i * width, (i + 1) * width) for i in range(count)),
        association=order,
        leaf_dtype=rule.leaf_dtype,
        bias_ranks=rollout_tp if rule.bias == "rank0" else 1,
    )


def association(contract_name: str, k_global: int, tp: int = 1, segments: int = 8) -> Association:
    """The association of the leaves, the same value for every `tp` that the contract supports.

    v1: leaves are 128-wide K tiles (`segments` is ignored); v2: leaves are the segments.
    Raises `ValueError` where this `tp` would give another order (v1: a rank's K is not a multiple
    of the tile; either: not a power of two, more ranks than segments, K not divisible).
    """
    reduction = row_reduction(contract_name, k_global, rollout_tp=tp, segments=segments)
    if reduction.path == "rollout-partition":
        tile = get_contract(contract_name).row_linear.tile
        raise ValueError(
            f"{contract_name}: K={k_global} at tensor_parallel_size={tp} leaves "
            f"{k_global // tp} a rank, not a multiple of the {tile}-wide tile, so the sum "
            "follows the rollout's partition and is not the same for every tensor_parallel_size"
        )
    local_association(reduction, tp)
    return reduction.association


def supported_tensor_parallel_sizes(
    contract_name: str, k_global: int, segments: int = 8
) -> tuple[int, ...]:
    """Every tensor-parallel size at which `association` holds for this K."""
    sizes = []
    for tp in (1, 2, 4, 8):
        try:
            association(contract_name, k_global, tp, segments)
        except ValueError:
            continue
        sizes.append(tp)
    return tuple(sizes)


def run_tree(num_leaves: int, run: int) -> Association:
    """Runs of `run` leaves added left to right, then a balanced tree over the runs."""
    runs = num_leaves // run if run > 0 else 0
    if runs < 1 or runs * run != num_leaves or runs & (runs - 1):
        raise ValueError(f"{num_leaves} leaves are not a power of two of runs of {run}")
    return _tree_of_runs(0, runs, run)


def run_of(node: Association) -> int:
    """The run length for which `run_tree(leaves, run)` is this association.

    Two integers, leaves and run, are what a kernel is compiled for; this is where they come from.
    """
    leaves = _leaf_count(node)
    run = leaves
    while run:
        if leaves % run == 0 and (leaves // run) & (leaves // run - 1) == 0:
            if run_tree(leaves, run) == node:
                return run
        run -= 1
    raise ValueError(f"not runs followed by a balanced tree: {node}")


def rank_association(tensor_parallel_size: int) -> Association:
    """How the ranks' partial sums are added: the top of the same tree."""
    _check_power_of_two("tensor_parallel_size", tensor_parallel_size, 8)
    return balanced(0, tensor_parallel_size)


def _leaf_count(node: Association) -> int:
    return 1 if isinstance(node, int) else _leaf_count(node[0]) + _leaf_count(node[1])


def _shift(node: Association, by: int) -> Association:
    return node + by if isinstance(node, int) else (_shift(node[0], by), _shift(node[1], by))


def local_association(reduction: RowReduction, tensor_parallel_size: int) -> Association:
    """The subtree one rank evaluates, with leaves numbered from 0; the same for every rank.

    Raises `ValueError` where a rank's shard of K is not a whole subtree, for then the ranks could
    not reproduce the order by exchanging one partial sum each.
    """
    _check_power_of_two("tensor_parallel_size", tensor_parallel_size, 8)
    nodes: list[Association] = [reduction.association]
    while len(nodes) < tensor_parallel_size:
        if any(isinstance(node, int) for node in nodes):
            raise ValueError(
                f"K={reduction.k_global} has {reduction.num_leaves} leaves "
                f"({reduction.path}); tensor_parallel_size={tensor_parallel_size} would cut a leaf"
            )
        nodes = [child for node in nodes if not isinstance(node, int) for child in node]
    per_rank = reduction.num_leaves // tensor_parallel_size
    first = nodes[0]
    for rank, node in enumerate(nodes):
        if _leaf_count(node) != per_rank or node != _shift(first, rank * per_rank):
            raise ValueError(
                f"K={reduction.k_global}: the {reduction.num_leaves} leaves do not fall into "
                f"{tensor_parallel_size} equal subtrees"
            )
    return first
