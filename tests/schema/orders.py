"""Orders of addition written without the schema's help: strings, a loop, a plain tree."""

from __future__ import annotations

from schema.reduction import Association

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"
TILE = 128
SIZES = (1, 2, 4, 8)


def text(node: Association) -> str:
    """Fully parenthesised, as `published_order` writes it."""
    return f"t{node}" if isinstance(node, int) else f"({text(node[0])}+{text(node[1])})"


def published_order(leaves: list[str]) -> str:
    """The published kernel's loop, over strings: tiles arrive one by one; a full run is carried
    up through the levels like a binary counter."""
    first, levels = len(leaves), 1
    while first > 2 and first % 2 == 0:
        first //= 2
        levels += 1
    partial: list[str | None] = [None] * levels
    run: str | None = None
    in_run = 0
    for leaf in leaves:
        run = leaf if run is None else f"({run}+{leaf})"
        in_run += 1
        if in_run < first:
            continue
        carry, run, in_run = run, None, 0
        for level in range(levels):
            below = partial[level]
            if below is None:
                partial[level] = carry
                break
            carry, partial[level] = f"({below}+{carry})", None
    (total,) = [value for value in partial if value is not None]
    return total


def plain_tree(leaves: list[Association]) -> Association:
    """Neighbours in pairs, the odd one carried: what a re-derivation of the order gets wrong."""
    while len(leaves) > 1:
        pairs: list[Association] = list(zip(leaves[0::2], leaves[1::2], strict=False))
        leaves = pairs + leaves[len(pairs) * 2 :]
    return leaves[0]


def names(count: int) -> list[str]:
    return [f"t{i}" for i in range(count)]
