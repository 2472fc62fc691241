"""A trainer rank in a Ray actor: the environment first, then Megatron."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from ..devices import host_facts
from ..plan import LaunchPlan
from .logs import redirect_output


class TrainerActor:
    """Runs inside the actor's process; `call` reaches every method of `TrainerRank`."""

    def __init__(self, env: Mapping[str, str], log_path: str) -> None:
        redirect_output(log_path)
        os.environ.update(env)
        self._rank: Any = None

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def host_facts(self) -> dict[str, str | None]:
        """This machine's driver, GPU capability and kernel package."""
        return host_facts()

    def rendezvous(self) -> tuple[str, int]:
        """(address, free port) of this node, for rank 0."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def start(self, config: dict[str, Any], model_path: str) -> None:
        """Join the group, build the model and its optimizer, load the weights."""
        from .trainer_rank import TrainerRank, TrainerRankConfig

        self._rank = TrainerRank(TrainerRankConfig(**config))
        self._rank.initialize()
        self._rank.load(model_path)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A collective method of `TrainerRank`, called on every rank alike."""
        return getattr(self._rank, method)(*args, **kwargs)

    def save(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder and this rank's optimizer beside them."""
        from .optimizer_state import save_optimizer

        self._rank.save_hf(folder)
        save_optimizer(self._rank, folder)

    def restore_optimizer(self, folder: str) -> None:
        """Read back what `save` wrote for the same layout."""
        from .optimizer_state import load_optimizer

        load_optimizer(self._rank, folder)

    def peak_memory(self) -> int:
        """Peak resident bytes of this process."""
        from .memory import peak_bytes

        return peak_bytes([os.getpid()])

    def shutdown(self) -> None:
        """Leave the process group."""
        if self._rank is not None:
            self._rank.shutdown()
            self._rank = None


def rank_config(
    plan: LaunchPlan, rank: int, address: str, port: int, device_index: int
) -> dict[str, Any]:
    """Keywords of `TrainerRankConfig` for one rank of the plan."""
    model, training = plan.model, plan.training
    fault = plan.fault if plan.fault is not None and plan.fault.side == "trainer" else None
    return {
        "rank": rank,
        "world_size": plan.trainer.world_size,
        "master_addr": address,
        "master_port": port,
        "device": plan.device,
        "local_device_index": device_index,
        "num_threads": int(plan.trainer.env.get("OMP_NUM_THREADS", "1")),
        "start_timeout_s": plan.cluster.start_timeout,
        "tensor_parallel_size": plan.layout.train_tp,
        "pipeline_parallel_size": plan.layout.pp,
        "context_parallel_size": plan.layout.cp,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.attention_bias,
        "qk_layernorm": model.qk_layernorm,
        "contract": plan.contract,
        "segments": plan.segments,
        "rollout_tensor_parallel_size": plan.layout.rollout_tp,
        "attention": plan.policy.attention_backend,
        "lr": training.lr,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_betas[0],
        "adam_beta2": training.adam_betas[1],
        "adam_eps": training.adam_eps,
        "clip_grad": training.clip_grad,
        "micro_batch_size": training.micro_batch_size,
        "micro_batch_tokens": training.micro_batch_tokens,
        "recompute": training.recompute,
        "logits_memory_bytes": training.logits_memory_mb << 20,
        "entropy": training.entropy,
        "fault": None if fault is None else fault.place,
        "seed": plan.run.seed,
        "megatron": plan.trainer.config_kwargs,
        "model": plan.trainer.model_kwargs,
    }
