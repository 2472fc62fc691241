"""Where the checks run, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how large. `rows` are batch sizes around tile borders; K sizes are per layer."""

    device: str
    rows: tuple[int, ...]
    hidden: tuple[int, ...]
    widths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    tile_numbers: tuple[int, ...]
    k_sizes: tuple[int, ...]
    columns: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]


FULL = Setting(
    device="cuda",
    rows=(1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    hidden=(128, 1024, 2560, 4096, 5120),
    widths=(3072, 9728),
    vocabularies=(300, 151936),
    tile_numbers=(1, 2, 3, 6, 7, 19, 24, 37, 38, 76, 100, 148),
    k_sizes=(4096, 4864, 9728),
    columns=640,
    lengths=(1, 5, 9, 64, 65, 300, 1025),
    head_dims=(64, 128),
)
# For the interpreter: the same claims, so that what runs on a GPU has run before.
SMALL = Setting(
    device="cpu",
    rows=(1, 16, 17),
    hidden=(96, 2560),
    widths=(72,),
    vocabularies=(300,),
    tile_numbers=(1, 3, 6),
    k_sizes=(384,),
    columns=24,
    lengths=(1, 9, 66),
    head_dims=(32,),
)
