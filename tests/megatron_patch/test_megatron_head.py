"""The head in chunks: the same bits whatever a chunk may hold, and never more rows than that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from megatron_models import V1, V2

from megatron_patch.layers.logits import rows_per_chunk

# 512 padded columns of the small model, a rank's half of them at TP=2, in six copies of fp32.
ROW = 4 * 6 * 512


def test_a_chunk_holds_what_fits_and_at_least_one_row() -> None:
    assert rows_per_chunk(256 << 20, 151936) == 73
    assert rows_per_chunk(ROW * 7, 512) == 7
    assert rows_per_chunk(1, 151936) == 1


@pytest.mark.parametrize(
    ("contract", "layout"), [(V2, (1, 1, 1)), (V2, (2, 1, 1)), (V1, (2, 1, 1)), (V2, (1, 1, 2))]
)
def test_bits_and_gradients_do_not_depend_on_the_chunk(
    ranks: Any, model_folder: Any, contract: str, layout: tuple[int, int, int]
) -> None:
    world = layout[0] * layout[1] * layout[2]

    def run(memory: int) -> list[dict[str, Any]]:
        options = {"contract": contract, "logits_memory_bytes": memory}
        options["segments"] = 4 if contract == V2 else 1
        return ranks.run(
            world,
            "head_tasks:in_chunks",
            str(model_folder("small")),
            "small",
            layout,
            options,
        )

    whole, parts = run(1 << 30), run(ROW * 7 // layout[0])
    for one, many in zip(whole, parts, strict=True):
        assert max(many["rows"]) == 7 and max(one["rows"]) > 7, "the chunks are real"
        assert sum(many["forward_rows"]) == sum(one["forward_rows"]) > 0
        scores, again = np.concatenate(one["scores"]), np.concatenate(many["scores"])
        assert np.array_equal(scores.view(np.int32), again.view(np.int32))
        assert many["train"]["loss"] == one["train"]["loss"]
        # BLAS associates by the number of rows, so a gradient of a hidden state may round to the
        # other bf16 neighbour, and the table's is added chunk by chunk.
        assert abs(many["train"]["grad_norm"] / one["train"]["grad_norm"] - 1) < 1e-4
    assert run(ROW * 7 // layout[0])[0]["train"] == parts[0]["train"], "and the same every time"
