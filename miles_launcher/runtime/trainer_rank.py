"""One rank of the Megatron trainer: score, train, export. A plain class; an actor may wrap it.

Every method is collective: call it on all ranks with equal arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patch import cpu_platform
from megatron_patch.config import ModelShape
from megatron_patch.contracts import policy_for
from megatron_patch.ops.digest import shard_digest
from megatron_patch.ops.formats import DTYPES
from megatron_patch.schema import DEFAULT_CONTRACT, padded_vocabulary

from .batch import Batch
from .dumps import as_arrays
from .trainer_config import CONTRACT_OFF, TrainerRankConfig
from .trainer_steps import PolicySteps, StockSteps
from .weight_sync import SentBucket, WeightSender

__all__ = ["Batch", "TrainerRank", "TrainerRankConfig"]


class TrainerRank:
    """A model shard with its optimizer. `initialize`, then `load`, then anything else."""

    def __init__(self, config: TrainerRankConfig) -> None:
        self.config = config
        self.shape = ModelShape(**{f.name: getattr(config, f.name) for f in fields(ModelShape)})
        self.device = torch.device("cpu")
        self._loaded_from: Path | None = None
        self._sender: WeightSender | None = None

    @contextlib.contextmanager
    def _platform(self) -> Iterator[None]:
        if self.config.device == "cuda":
            yield
        else:
            with cpu_platform.active():
                yield

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and head tables over all ranks."""
        contract = self.config.contract
        name = DEFAULT_CONTRACT if contract == CONTRACT_OFF else contract
        return padded_vocabulary(name, self.shape.vocab_size)

    def _check_model_arguments(self) -> None:
        """`ValueError` where the plan's GPTModel arguments are not those of this model."""
        built: dict[str, Any] = {
            "vocab_size": self.padded_vocab_size,
            "max_sequence_length": self.shape.max_position_embeddings,
            "share_embeddings_and_output_weights": self.shape.tie_word_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.shape.rope_theta,
            "parallel_output": True,
        }
        wrong = [
            f"{name}={value!r} (this model has {built.get(name)!r})"
            for name, value in self.config.model.items()
            if name not in built or built[name] != value
        ]
        if wrong:
            raise ValueError("model arguments contradict the run: " + "; ".join(wrong))

    def initialize(self) -> None:
        """Join the process group; build model, gradient buffers and optimizer.

        Raises `ValueError` where the layout, the contract or the model cannot go together.
        """
        config = self.config
        self._check_model_arguments()
        torch.set_num_threads(config.num_threads)
        if config.device == "cuda":
            self.device = torch.device("cuda", config.local_device_index)
            torch.cuda.set_device(self.device)
            # Backward must give the same bits twice; cuBLAS also wants its workspace setting,
            # which the launcher renders into this process's environment.
            torch.use_deterministic_algorithms(True, warn_only=True)
            # A check for code that reads what nobody wrote: one more pass over every new tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if config.device == "cuda" else "gloo",
            init_method=f"tcp://{config.master_addr}:{config.master_port}",
            rank=config.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=config.start_timeout_s),
        )
        with self._platform():
            self._build()

    def _build(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_patch import faults
        from megatron_patch.model import build_policy_model, build_stock_model

        config = self.config
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel_size,
            pipeline_model_parallel_size=config.pipeline_parallel_size,
            context_parallel_size=config.context_parallel_size,
            create_gloo_process_groups=False,
        )
        torch.manual_seed(config.seed)
        if config.device == "cuda":
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(config.seed)
        options: dict[str, Any] = {
            "device": self.device,
            "recompute": config.recompute,
            "megatron": _megatron_fields(config.megatron),
        }
        if config.contract == CONTRACT_OFF:
            self.model = build_stock_model(self.shape, **options)
            self.steps: PolicySteps = StockSteps(self.model, config, self.device)
        else:
            policy = policy_for(
                config.contract,
                segments=config.segments,
                rollout_tensor_parallel_size=config.rollout_tensor_parallel_size,
                tensor_parallel_size=config.tensor_parallel_size,
                vocab_size=self.shape.vocab_size,
                attention_width=self.shape.attention_width,
                intermediate_size=self.shape.intermediate_size,
                attention=config.attention,
            )
            self.model = build_policy_model(
                self.shape,
                policy,
                logits_memory_bytes=config.logits_memory_bytes,
                entropy=config.entropy,
                **options,
            )
            self.steps = PolicySteps(self.model, config, self.device)
        fault = None if config.fault is None else faults.parse_fault(config.fault)
        faults.set_fault(fault, parallel_state.get_tensor_model_parallel_rank())
        self.model.to(self.device)
        self.ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=False,
                check_for_nan_in_grad=True,
            ),
            self.model,
        )
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                # Clipped before the step, by the same amount at every tensor-parallel size.
                clip_grad=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=False,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )

    def load(self, model_path: str | Path) -> None:
        """Read this rank's share of a Hugging Face folder; the optimizer starts from it.

        Raises `ValueError` naming a tensor that is missing, mis-shaped or not bf16.
        """
        from megatron_patch.checkpoint import load_hf

        folder = Path(model_path)
        with self._platform():
            load_hf(self.model, self.shape, self.padded_vocab_size, folder)
            self.optimizer.reload_model_params()
        self._loaded_from = folder

    def _require_weights(self) -> Path:
        if self._loaded_from is None:
            raise ValueError("trainer rank: no weights yet; call load(model_path) first")
        return self._loaded_from

    def score(
        self, batch: Batch, temperature: float, sequences_per_micro_batch: int | None = None
    ) -> list[np.ndarray]:
        """Logprobs of every response token at `temperature`: per sequence an fp32 array of its
        response length, the same on every rank. No graph is kept. Sequences a micro-batch are the
        configured ones unless given."""
        self._require_weights()
        with self._platform(), torch.no_grad():
            self.ddp.eval()
            flat = self.steps.score(self.ddp, batch, temperature, sequences_per_micro_batch)
        return np.split(flat.cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])

    def train(
        self,
        batch: Batch,
        advantages: Sequence[float],
        old_logprobs: Sequence[np.ndarray],
        temperature: float,
        clip_eps: float = 0.2,
    ) -> dict[str, float]:
        """One optimizer step on the clipped policy loss, divided by the number of response tokens.

        advantages: one number per sequence; old_logprobs: per sequence the rollout's fp32
        logprobs. Returns, on every rank, `loss`, `grad_norm` (before clipping), `clip_fraction`,
        `num_tokens`, `max_abs_logprob_diff` (new against old), `update_applied` (1.0 or 0.0) and,
        where the configuration asks for it, `entropy` (nats, mean over the tokens).
        Raises `ValueError` on lengths that do not fit, numbers that are not finite, or a batch
        without response tokens.
        """
        from megatron_patch.grad_norm import clip_gradients

        self._require_weights()
        per_token = _per_token(batch, advantages, old_logprobs)
        with self._platform():
            self.ddp.train()
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            result = self.steps.train(self.ddp, batch, *per_token, temperature, clip_eps)
            grad_norm = clip_gradients(self.ddp, self.config.clip_grad)
            applied, _, _ = self.optimizer.step()
        return {**result, "grad_norm": grad_norm, "update_applied": float(bool(applied))}

    def begin_weight_sync(self) -> int:
        """Make ready to hand over the weights; how many buckets there are."""
        from megatron_patch.checkpoint import WeightExport

        with self._platform():
            export = WeightExport(self.model, self.shape, self.padded_vocab_size)
            self._sender = WeightSender(export, self.device)
        return len(self._sender.buckets)

    def send_weights(self, index: int, readers: int, sources: int) -> SentBucket | None:
        """Bucket `index`, as `weight_sync.WeightSender.send` hands it over."""
        assert self._sender is not None, "begin_weight_sync first"
        with self._platform():
            return self._sender.send(index, readers, sources)

    def end_weight_sync(self) -> None:
        """Every reader is done: the last bucket's memory is free again."""
        self._sender = None
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def gradients(self, batch: Batch, temperature: float, recompute: str) -> dict[str, Any]:
        """The gradient of a batch whose advantages are 1 and -1 in turn, no step: `grad_norm` of
        the whole model, and `digest`, SHA-256 (hex) of this rank's gradient bits. recompute:
        `none` or `full`, for this call alone."""
        from megatron_patch.grad_norm import gradient_norm

        old = self.score(batch, temperature)
        advantages = [1.0 - 2.0 * (number % 2) for number in range(len(batch))]
        per_token = _per_token(batch, advantages, old)
        with self._platform(), recomputing(self.model.config, recompute):
            self.ddp.train()
            self.ddp.zero_grad_buffer()
            self.steps.train(self.ddp, batch, *per_token, temperature, 0.2)
            norm = gradient_norm(self.ddp.module)
            digest = hashlib.sha256()
            for name, parameter in self.model.named_parameters():
                bits = parameter.main_grad.detach().contiguous()
                rows = bits.reshape(-1, bits.shape[-1])
                number = shard_digest(rows, (0, rows.shape[0]), (0, rows.shape[1]))
                digest.update(f"{name}={number:016x}\n".encode())
            self.ddp.zero_grad_buffer()
        return {"grad_norm": norm, "digest": digest.hexdigest()}

    def export_weights(self) -> list[tuple[str, torch.Tensor]]:
        """On rank 0 every (Hugging Face name, whole bf16 CPU tensor); elsewhere an empty list."""
        from megatron_patch.checkpoint import export_hf

        with self._platform():
            return list(export_hf(self.model, self.shape, self.padded_vocab_size))

    def weights_digest(self) -> str:
        """Digest of the whole model's bits (64 hex digits), the same on every rank."""
        from megatron_patch.checkpoint import weights_digest

        with self._platform():
            return weights_digest(self.model, self.shape, self.padded_vocab_size)

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, with the loaded folder's config and tokenizer files."""
        from megatron_patch.checkpoint import save_hf

        like = self._require_weights()
        with self._platform():
            save_hf(self.model, self.shape, self.padded_vocab_size, Path(folder), like)

    def readback(self) -> dict[str, Any]:
        """What is live in this rank (`megatron_patch.readback`), with its place in the layout."""
        from megatron.core import parallel_state

        place = {
            "rank": self.config.rank,
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "cp_rank": parallel_state.get_context_parallel_rank(),
            "loaded": self._loaded_from is not None,
        }
        if self.config.contract == CONTRACT_OFF:
            return {**place, "contract": CONTRACT_OFF, "fingerprint": None}
        from megatron_patch.readback import readback

        return {**place, **readback(self.model.config, self.device)}

    def start_taps(self, keep: str | None = None, fault: str | None = None) -> None:
        """Record the rows of every tap; `fault` is injected until they are finished. `ValueError`
        for the stock control, which has no taps."""
        from megatron.core import parallel_state

        from megatron_patch import faults
        from megatron_patch.taps import start_taps

        if self.config.contract == CONTRACT_OFF:
            raise ValueError("contract off: stock layers have no taps")
        rank = parallel_state.get_tensor_model_parallel_rank()
        if fault is not None:
            faults.set_fault(faults.parse_fault(fault), rank)
        start_taps(self.shape, rank, self.config.tensor_parallel_size, keep)

    def finish_taps(self) -> dict[str, Any]:
        """Stop recording, and injecting all but the configured fault: `tp_rank`, and `taps`, the
        dump as arrays (`TapLog.dump`)."""
        from megatron.core import parallel_state

        from megatron_patch import faults
        from megatron_patch.taps import finish_taps

        rank = parallel_state.get_tensor_model_parallel_rank()
        dump = as_arrays(finish_taps())
        configured = self.config.fault
        faults.set_fault(None if configured is None else faults.parse_fault(configured), rank)
        return {"tp_rank": rank, "taps": dump}

    def shutdown(self) -> None:
        """Leave the process group; the object is of no further use. Safe to call twice."""
        from megatron.core import parallel_state

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextlib.contextmanager
def recomputing(config: Any, recompute: str) -> Iterator[None]:
    """megatron's recomputation of activations as asked, for the body; `none` or `full`."""
    fields_: dict[str, Any] = {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    before = {name: getattr(config, name) for name in fields_}
    if recompute == "full":
        fields_ = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute != "none":
        raise ValueError(f"recompute={recompute!r}; choose none or full")
    try:
        for name, value in fields_.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype")
_ACTIVATIONS = {"silu": torch.nn.functional.silu}


def _megatron_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields from their plain form in a plan."""
    fields_ = dict(plain)
    for name in _DTYPE_FIELDS:
        if name in fields_:
            fields_[name] = DTYPES[fields_[name]]
    if "activation_func" in fields_:
        fields_["activation_func"] = _ACTIVATIONS[fields_["activation_func"]]
    return fields_


def _per_token(
    batch: Batch, advantages: Sequence[float], old_logprobs: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and old logprobs, one fp32 number per response token of the batch."""
    if len(advantages) != len(batch) or len(old_logprobs) != len(batch):
        raise ValueError(
            f"train: {len(batch)} sequences, {len(advantages)} advantages, "
            f"{len(old_logprobs)} arrays of logprobs; all three must be equal"
        )
    if batch.num_response_tokens == 0:
        raise ValueError("train: the batch has no response token; there is nothing to learn from")
    for number, (old, length) in enumerate(zip(old_logprobs, batch.response_lengths, strict=True)):
        if len(old) != length:
            raise ValueError(
                f"train: sequence {number} has {length} response tokens and {len(old)} logprobs"
            )
    per_token = np.repeat(np.asarray(advantages, dtype=np.float32), batch.response_lengths)
    old = np.concatenate([np.asarray(x, dtype=np.float32) for x in old_logprobs])
    if not (np.isfinite(per_token).all() and np.isfinite(old).all()):
        raise ValueError("train: advantages and logprobs must be finite")
    return per_token, old
