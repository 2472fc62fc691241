"""Forward and backward of the contract's trainer against Megatron-core's local spec, one GPU.

    PYTHONPATH=. python3 -m benchmarks.train_throughput OUT.json [--model qwen3-4b] [--profile]

Both models stand in one process and take turns; figures are medians. Both run the same micro-batch
of packed sequences, the same policy loss, gradients into the same fp32 buffers, no optimizer, no
recomputation. The local spec's attention, which would hold whole score matrices, is replaced by the
contract's own, forward and backward, and its fusions of SiLU and of the residual are on; its loss
is Megatron's vocabulary-parallel cross entropy. `stock` runs without PyTorch's deterministic
algorithms, `stock_deterministic` with them, as the contract does.
`--profile` adds the ops that take the longest. `--device cpu --model qwen3-tiny` runs the same code
without a GPU; its figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_SEQUENCES = {"cuda": (8, 1024), "cpu": (2, 12)}
_TOP = 40
VARIANTS = ("contract", "stock", "stock_deterministic")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Pair:
    """Both models on one device; `step` runs one of them forward and backward."""

    def __init__(self, model: str, device: str, out: Path) -> None:
        from miles_launcher.resolve import LaunchArgs, resolve
        from miles_launcher.runtime.trainer import rank_config

        sequences, length = _SEQUENCES[device]
        overrides = (
            "train.recompute=none",
            f"train.micro_batch_size={sequences}",
            "train.micro_batch_tokens=0",
            f"run.prompts_per_step={sequences}",
            "run.samples_per_prompt=1",
        )
        plan = resolve(LaunchArgs(model=model, device=device, out=out, overrides=overrides))
        os.environ.update(plan.trainer.env)
        import torch

        from miles_launcher.runtime.batch import Batch
        from miles_launcher.runtime.trainer_rank import TrainerRank, TrainerRankConfig

        self.torch, self.device = torch, device
        self.attention: Any = importlib.import_module("megatron_patch.autograd.attention")
        self.deterministic_algorithms = self.attention.deterministic_algorithms
        config = rank_config(plan, 0, "127.0.0.1", _free_port(), 0)
        self.rank = TrainerRank(TrainerRankConfig(**config))
        self.rank.initialize()
        # Gradients only: the optimizer's master weights would take a third of the memory.
        self.rank.optimizer = None
        draw = random.Random(0)
        tokens = [
            [draw.randrange(plan.model.vocab_size) for _ in range(length)] for _ in range(sequences)
        ]
        self.batch = Batch(
            tokens=tokens,
            prompt_lengths=[1] * sequences,
            response_lengths=[length - 1] * sequences,
        )
        with self.rank._platform():
            self.stock = _stock_model(self.rank)
            self.stock_steps = _stock_steps(self.rank, self.stock.module, sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens that one step puts through the model."""
        return sum(map(len, self.batch.tokens))

    def _of(self, variant: str) -> tuple[Any, Any]:
        # In the deterministic mode PyTorch takes slower backward kernels; only the contract has to.
        self.torch.use_deterministic_algorithms(variant != "stock", warn_only=True)
        # The contract's attention asks for the slower kernel by itself.
        self.attention.deterministic_algorithms = (
            nullcontext if variant == "stock" else self.deterministic_algorithms
        )
        if variant == "contract":
            return self.rank.steps, self.rank.ddp
        return self.stock_steps, self.stock

    def train(self, variant: str) -> None:
        """Forward and backward of one micro-batch."""
        import numpy as np

        steps, ddp = self._of(variant)
        count = self.batch.num_response_tokens
        with self.rank._platform():
            ddp.train()
            ddp.zero_grad_buffer()
            # New over old is 1 nowhere; the loss is clipped or not, the work is the same.
            old = np.full(count, -1.0, dtype=np.float32)
            steps.train(ddp, self.batch, np.ones(count, np.float32), old, 1.0, 1e30)

    def score(self, variant: str) -> None:
        """Forward alone."""
        steps, ddp = self._of(variant)
        with self.rank._platform(), self.torch.no_grad():
            ddp.eval()
            steps.score(ddp, self.batch, 1.0)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def profile(self, work: Callable[[], None]) -> list[dict[str, Any]]:
        """Rows `name`, `microseconds`, `calls`, `share` of one call, the longest first."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device == "cuda"
        with profile(
            activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True
        ) as found:
            work()
            self.synchronize()
        key = "self_device_time_total" if cuda else "self_cpu_time_total"
        events = [(e.key, float(getattr(e, key)), int(e.count)) for e in found.key_averages()]
        whole = sum(time_ for _, time_, _ in events) or 1.0
        rows = [
            {
                "name": name[:160],
                "microseconds": round(time_, 1),
                "calls": calls,
                "share": round(time_ / whole, 4),
            }
            for name, time_, calls in events
        ]
        return sorted(rows, key=lambda row: -row["microseconds"])[:_TOP]


def _stock_model(rank: Any) -> Any:
    """Megatron's own model with the contract's attention, wrapped as the trainer wraps its own."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_patch import autograd
    from megatron_patch.model import build_stock_model

    class PackedAttention(torch.nn.Module):
        """The local spec's core attention over one row of packed sequences, [tokens, 1, ...]."""

        lengths: list[int]

        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            out = autograd.attention(
                query.squeeze(1),
                key.squeeze(1),
                value.squeeze(1).contiguous(),
                lengths=self.lengths,
                scale=self.scale,
                path=rank.config.attention,
            )
            return out.reshape(out.shape[0], 1, -1)

    model = build_stock_model(rank.shape, device=rank.device)
    model.config.bias_activation_fusion = True
    model.config.bias_dropout_fusion = True
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = PackedAttention(rank.shape.head_dim**-0.5)
    model.to(rank.device)
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
            check_for_nan_in_grad=True,
        ),
        model,
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    return ddp


def _stock_steps(rank: Any, model: Any, sequences: int) -> Any:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from miles_launcher.runtime.trainer_steps import PolicySteps

    class PackedSteps(PolicySteps):
        """Megatron's model over packed sequences, its own cross entropy as the logprob."""

        def logprobs(self, batch: Any) -> Any:
            for layer in self.model.decoder.layers:
                layer.self_attention.core_attention.lengths = batch.lengths
            logits = self.model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                attention_mask=None,
            )
            rows = logits[0].index_select(0, batch.scored)
            return -vocab_parallel_cross_entropy(rows, batch.targets)

    steps = PackedSteps(model, rank.config, rank.device)
    steps.sequences_per_micro_batch = sequences
    return steps


def measure(pair: Pair, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows with every round, ratios of the medians), variants in turn within a round."""
    rows, ratios = [], []
    for what, work in (("forward_backward", pair.train), ("forward", pair.score)):
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(rounds + 2):
            for variant in VARIANTS:
                pair.synchronize()
                began = time.perf_counter()
                work(variant)
                pair.synchronize()
                if number >= 2:
                    seconds[variant].append(time.perf_counter() - began)
        medians = {variant: statistics.median(values) for variant, values in seconds.items()}
        for variant, values in seconds.items():
            rows.append(
                {
                    "what": what,
                    "variant": variant,
                    "ms": round(1e3 * medians[variant], 3),
                    "tokens_per_s": round(pair.num_tokens / medians[variant], 1),
                    "rounds_ms": [round(1e3 * value, 3) for value in values],
                }
            )
        ratios.append(
            {
                "what": what,
                "over_stock": round(medians["stock"] / medians["contract"], 4),
                "over_stock_deterministic": round(
                    medians["stock_deterministic"] / medians["contract"], 4
                ),
            }
        )
        print(f"{what}: {medians} s; contract {ratios[-1]}", flush=True)
    return rows, ratios


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.train_throughput")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    from miles_launcher.gpu_gate.machine import device_name, versions

    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(options.model, options.device, Path(folder) / "run")
        sequences, length = _SEQUENCES[options.device]
        result: dict[str, Any] = {
            "benchmark": "train_throughput",
            "model": options.model,
            "device": device_name(options.device),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "sequences": sequences,
            "tokens_per_sequence": length,
        }
        result["rows"], result["ratios"] = measure(pair, options.rounds)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        if options.profile:
            result["profile"] = {
                variant: pair.profile(lambda variant=variant: pair.train(variant))  # type: ignore[misc]
                for variant in ("contract", "stock")
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        pair.rank.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
