"""How large the suite's inputs are. The claims are the same in every setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes. `rows` are batch sizes around the tile borders, `tiles` K tiles of contract v1,
    `k_sizes` odd and whole K of a product, `row_k_sizes` K of a row-parallel linear (multiples of
    1024), `columns` N of a product, `odd_vocabularies` around segment borders, `lengths` sequences
    of a batch, `repeat_rows` rows of a call that is repeated, `tp` the degrees of simulated shards,
    `ranks` those of real ranks."""

    name: str
    rows: tuple[int, ...]
    tiles: tuple[int, ...]
    k_sizes: tuple[int, ...]
    row_k_sizes: tuple[int, ...]
    columns: int
    hidden: tuple[int, ...]
    widths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    odd_vocabularies: tuple[int, ...]
    repeat_rows: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    tp: tuple[int, ...] = (1, 2, 4, 8)
    ranks: tuple[int, ...] = (2, 4, 8)


_BORDERS = (1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_ODD_VOCABULARIES = (1, 63, 64, 65, 511, 512, 513)
_TILES = (1, 2, 3, 6, 7, 19, 24, 37, 38, 76, 100, 148)

# A GPU: real layers' sizes.
CUDA = Setting(
    name="full",
    rows=_BORDERS,
    tiles=_TILES,
    k_sizes=(200, 1000, 4096),
    row_k_sizes=(4096, 9728),
    columns=640,
    hidden=(128, 1000, 1024, 2560, 5120),
    widths=(100, 3072, 9728),
    vocabularies=(300, 151936),
    odd_vocabularies=_ODD_VOCABULARIES,
    repeat_rows=129,
    lengths=(1, 5, 9, 64, 65, 300, 1025),
    # FA3 on Hopper has those of 128; the Triton path has both.
    head_dims=(64, 128),
)
# A CPU: the same borders, tiles and degrees; the reference adds one k after the other, so fewer
# columns. Its code has no other path for a larger size.
CPU = Setting(
    name="full",
    rows=_BORDERS,
    tiles=_TILES,
    k_sizes=(70, 200, 1024),
    row_k_sizes=(1024, 2048),
    columns=24,
    hidden=(96, 128, 2560),
    widths=(72, 3072),
    vocabularies=(300, 151936),
    odd_vocabularies=_ODD_VOCABULARIES,
    repeat_rows=129,
    lengths=(1, 5, 9, 33),
    head_dims=(32, 128),
)
# Tests, and Triton's interpreter.
SMALL = Setting(
    name="small",
    rows=(1, 16, 17),
    tiles=(1, 3, 6, 24),
    k_sizes=(70, 128),
    row_k_sizes=(1024,),
    columns=16,
    hidden=(96, 2560),
    widths=(72,),
    vocabularies=(300,),
    odd_vocabularies=(1, 65),
    repeat_rows=5,
    lengths=(1, 5, 9),
    head_dims=(32,),
    ranks=(2, 4),
)

FULL: Mapping[str, Setting] = MappingProxyType({"cpu": CPU, "cuda": CUDA})
