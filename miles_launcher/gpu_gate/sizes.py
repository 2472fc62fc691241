"""How large the batches of the gate are: prompts, samples and the borders that they straddle."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens. prompt_lengths: each sampled `samples` times, `new_tokens` each.

    hit_lengths: prefixes to be found in the cache; chunk_lengths: prompts around the borders of
    prefill chunks; batch_sizes: requests at once, around those that CUDA graphs are padded to;
    micro_batches: sequences in a scoring micro-batch (0: the whole batch packed into one).
    """

    prompt_lengths: tuple[int, ...]
    samples: int
    new_tokens: int
    hit_lengths: tuple[int, ...]
    chunk_size: int
    chunk_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_new_tokens: int
    micro_batches: tuple[int, ...]
    gradient_lengths: tuple[int, ...]
    training: tuple[int, int, int]
    min_tokens: int


def _around(*borders: int) -> tuple[int, ...]:
    return tuple(length for border in borders for length in (border - 1, border, border + 1))


FULL = Sizes(
    # 32 lengths from 9 to 4,097: page (64, 128), tile and chunk (2,048) borders, and between them.
    prompt_lengths=(
        9, 10, 17, 33, 100, *_around(64, 128, 256, 512, 1024, 2048), 300, 700, 1500, 2500, 3000,
        3600, *_around(4096),
    ),
    samples=2,
    new_tokens=64,
    hit_lengths=(
        1, 2, 8, 15, 16, 17, *_around(32, 64, 128, 256, 512, 1024, 2048), 3000, 4000,
        *_around(4096),
    ),
    chunk_size=2048,
    chunk_lengths=(2046, 2047, 2048, 2049, 2050, 4094, 4095, 4096, 4097, 4098, 6143, 6144, 6145),
    batch_sizes=(
        1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64,
    ),
    batch_new_tokens=8,
    micro_batches=(1, 2, 8, 0),
    gradient_lengths=(9, 64, 65, 127, 300, 513, 40, 200),
    training=(8, 8, 64),
    min_tokens=4096,
)  # fmt: skip

# The same borders in a model that a CPU runs: every path, few tokens, no claim about size.
SMALL = Sizes(
    prompt_lengths=(9, 15, 16, 17, 31, 33, 40, 65),
    samples=1,
    new_tokens=4,
    hit_lengths=(1, 15, 16, 17, 40),
    chunk_size=32,
    chunk_lengths=(31, 32, 33, 65),
    batch_sizes=(1, 3, 5),
    batch_new_tokens=3,
    micro_batches=(1, 2, 0),
    gradient_lengths=(9, 17),
    training=(2, 2, 6),
    min_tokens=16,
)


def prompt(length: int, vocab_size: int, *place: object) -> list[int]:
    """`length` token ids drawn evenly, the same for the same place in every run."""
    draw = random.Random(":".join(map(str, place)))
    return [draw.randrange(vocab_size) for _ in range(length)]
