"""From decisions to engine arguments, trainer arguments and the environment of each role.

`switches` is the one table: a row is one decision with everything that carries it out on both
sides and what a rank must report once it is live. Nothing else renders an argument or a variable,
so that no flag can promise what no code sets. Values are plain JSON; dtypes and functions are
named by strings (`bfloat16`, `silu`), because nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .faults import FaultPlan
from .layout import Layout
from .policy import ATTENTION_BACKENDS, Device, KernelPolicy
from .profiles import ModelProfile
from .settings import Settings

Role = Literal["rollout", "trainer"]

PLUGIN = "true_on_policy"
CPU_PLATFORM = "true_on_policy_cpu"
# The fields that our plugin adds to SGLang's ServerArgs; all others must exist there.
OWN_ENGINE_FIELDS = frozenset({"true_on_policy_contract", "true_on_policy_fault"})

# Hiding the GPUs is what `--device cpu` asks for, so a user's value is no contradiction; a thread
# count changes no bits, so the user's own is kept.
HIDDEN_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES"})
YIELDING_VARIABLES = frozenset({"OMP_NUM_THREADS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderInputs:
    """All that rendering depends on. `cpu_ids`: the cores that CPU ranks may use, in order."""

    profile: ModelProfile
    layout: Layout
    policy: KernelPolicy
    settings: Settings
    device: Device
    model_path: str
    cpu_ids: tuple[int, ...]
    fault: FaultPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One decision. `setting` names what the user sets (or `always`); `engine` are keywords of
    `sglang.Engine`, `config` of Megatron's TransformerConfig, `model` of its GPTModel; `readback`
    names the engine arguments that a live scheduler must report unchanged."""

    setting: str
    reason: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    rollout_env: Mapping[str, str] = field(default_factory=dict)
    trainer_env: Mapping[str, str] = field(default_factory=dict)
    readback: tuple[str, ...] = ()


def switches(inputs: RenderInputs) -> tuple[Switch, ...]:
    """The table for one plan, in the order in which it is shown."""
    return (
        _contract(inputs),
        _device(inputs),
        _attention(inputs),
        _layout(inputs),
        _transport(inputs),
        _shape(inputs),
        _numbers(inputs),
        _engine_sizes(inputs),
        _recompute(inputs),
        Switch(
            setting="run.seed",
            reason="the engine's seed; every request also carries its own",
            engine={"random_seed": inputs.settings.run.seed},
        ),
        _fault(inputs),
    )


def _contract(inputs: RenderInputs) -> Switch:
    policy = inputs.policy
    env = {"SGLANG_PLUGINS": PLUGIN}
    target = inputs.settings.rollout.stock_on_policy_target
    if target is not None:
        assert not policy.patched
        return Switch(
            setting="rollout.stock_on_policy_target",
            reason="control: SGLang's own on-policy mode, which must not come out exact",
            engine={"rl_on_policy_target": target},
            rollout_env=env,
            readback=("rl_on_policy_target",),
        )
    if not policy.patched:
        return Switch(
            setting="--contract",
            reason="control: stock kernels on both sides, which must not come out exact",
            rollout_env=env,
        )
    return Switch(
        setting="--contract",
        reason="patched rollout surfaces; the number of segments travels with the name",
        engine={
            "true_on_policy_contract": f"{policy.contract}:segments={policy.segments}",
            "enable_deterministic_inference": True,
        },
        rollout_env=env,
        readback=("true_on_policy_contract", "enable_deterministic_inference"),
    )


def _device(inputs: RenderInputs) -> Switch:
    if inputs.device == "cuda":
        return Switch(
            setting="--device",
            reason="a GPU; fp32 products never in TF32, cuBLAS with a fixed workspace",
            engine={"device": "cuda"},
            config={"use_cpu_initialization": False, "batch_p2p_comm": True},
            rollout_env={"NVIDIA_TF32_OVERRIDE": "0"},
            trainer_env={"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            readback=("device",),
        )
    return Switch(
        setting="--device",
        reason="no GPU: the real engine on its CPU platform, any GPU hidden",
        engine={"device": "cpu"},
        config={"use_cpu_initialization": True, "batch_p2p_comm": False},
        rollout_env={
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_PLATFORM": CPU_PLATFORM,
            # The engine's own CPU path wants an AMX build of its kernels.
            "SGLANG_USE_CPU_ENGINE": "0",
            # Nothing on this path is compiled, and compiling costs more than it gives here.
            "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": core_groups(inputs.cpu_ids, inputs.layout.rollout_tp),
        },
        trainer_env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        readback=("device",),
    )


def _attention(inputs: RenderInputs) -> Switch:
    path = inputs.policy.attention_backend
    return Switch(
        setting="--device, attention",
        reason=f"attention on both sides: {path}; sampling in PyTorch",
        engine={
            "attention_backend": ATTENTION_BACKENDS[path],
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
        },
        config={"attention_softmax_in_fp32": True, "apply_query_key_layer_scaling": False},
        # Ours splits by its own rule; the engine would reserve results for splits of 256 keys.
        rollout_env={"SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE": str(1 << 20)}
        if path == "triton" and inputs.policy.patched
        else {},
        readback=("attention_backend", "sampling_backend"),
    )


def _layout(inputs: RenderInputs) -> Switch:
    layout = inputs.layout
    config: dict[str, Any] = {
        "tensor_model_parallel_size": layout.train_tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": False,
        # The contract's residual stream is fp32 and crosses the stage boundary as it is.
        "pipeline_dtype": "float32" if inputs.policy.patched else "bfloat16",
        "variable_seq_lengths": layout.pp > 1,
    }
    if layout.cp > 1:
        config["cp_comm_type"] = "a2a"
    return Switch(
        setting="--tp, --rollout-tp, --train-tp, --pp, --cp",
        reason="parallel degrees; context parallel is Ulysses (all-to-all over heads)",
        engine={"tp_size": layout.rollout_tp},
        config=config,
        readback=("tp_size",),
    )


def _transport(inputs: RenderInputs) -> Switch:
    engine = {
        "disable_custom_all_reduce": True,
        "enable_nccl_nvls": False,
        "enable_symm_mem": False,
        "enable_torch_symm_mem": False,
        "enable_mscclpp": False,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    }
    shared = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    gpu = inputs.device == "cuda"
    return Switch(
        setting="always",
        reason="no collective that adds in its own order; NCCL_ALGO has one owner per role",
        engine=engine,
        # SGLang itself sets this value under deterministic inference at TP > 1.
        rollout_env={**shared, "NCCL_ALGO": "allreduce:tree"} if gpu else {},
        trainer_env={**shared, "NCCL_ALGO": "Ring"} if gpu else {},
        readback=tuple(engine),
    )


def _shape(inputs: RenderInputs) -> Switch:
    profile = inputs.profile
    return Switch(
        setting="MODEL, --model-path",
        reason="the profile's shape; the trainer's table is padded to whole vocabulary segments",
        engine={"model_path": inputs.model_path},
        config={
            "num_layers": profile.num_hidden_layers,
            "hidden_size": profile.hidden_size,
            "ffn_hidden_size": profile.intermediate_size,
            "num_attention_heads": profile.num_attention_heads,
            "num_query_groups": profile.num_key_value_heads,
            "kv_channels": profile.head_dim,
            "qk_layernorm": profile.qk_layernorm,
            "normalization": "RMSNorm",
            "layernorm_epsilon": profile.rms_norm_eps,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": profile.attention_bias,
        },
        model={
            "vocab_size": inputs.policy.vocabulary.padded_size,
            "max_sequence_length": profile.max_position_embeddings,
            "share_embeddings_and_output_weights": profile.tie_word_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": profile.rope_theta,
            "parallel_output": True,
        },
    )


def _numbers(inputs: RenderInputs) -> Switch:
    return Switch(
        setting="always",
        reason="bf16 weights, fp32 residual stream, no dropout, no fused second implementation",
        engine={"dtype": "bfloat16"},
        config={
            "bf16": True,
            "params_dtype": "bfloat16",
            "fp32_residual_connection": inputs.policy.patched,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "transformer_impl": "local",
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "gradient_accumulation_fusion": False,
            "deterministic_mode": True,
        },
        readback=("dtype",),
    )


def _engine_sizes(inputs: RenderInputs) -> Switch:
    rollout, cluster = inputs.settings.rollout, inputs.settings.cluster
    fraction, total = rollout.mem_fraction_static, rollout.max_total_tokens
    if inputs.device == "cuda":
        # Colocated, the trainer's weights, gradients and optimizer take the other part.
        fraction = fraction or (0.4 if cluster.colocate else 0.85)
    else:
        # On a CPU the engine cannot learn a rank's share of memory, so the pool is given in tokens.
        fraction, total = fraction or 0.3, total or 16384
    engine: dict[str, Any] = {
        "mem_fraction_static": fraction,
        "page_size": 1,
        "max_running_requests": rollout.max_running_requests,
        "context_length": rollout.context_length or inputs.profile.max_position_embeddings,
        "chunked_prefill_size": rollout.chunked_prefill_size,
        "disable_radix_cache": not rollout.radix_cache,
        "disable_cuda_graph": inputs.device == "cpu" or not rollout.cuda_graph,
        "skip_server_warmup": True,
        # An idle scheduler polls in a loop; colocated on CPU cores it would starve the trainer.
        "sleep_on_idle": inputs.device == "cpu",
        # Prompts go in and responses come out as token ids; the launcher holds the tokenizer.
        "skip_tokenizer_init": True,
        "log_level": rollout.log_level,
    }
    if total is not None:
        engine["max_total_tokens"] = total
    return Switch(
        setting="rollout.*",
        reason="sizes of the engine; what has changed a row's bits before is off until asked for",
        engine=engine,
        readback=("page_size", "chunked_prefill_size", "disable_radix_cache", "disable_cuda_graph"),
    )


def _recompute(inputs: RenderInputs) -> Switch:
    full = inputs.settings.train.recompute == "full"
    return Switch(
        setting="train.recompute",
        reason="activations recomputed in the backward pass, one layer at a time"
        if full
        else "activations kept",
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        if full
        else {},
    )


def _fault(inputs: RenderInputs) -> Switch:
    fault = inputs.fault
    if fault is None or fault.side == "trainer":
        # The trainer's ranks are built from the plan and read the fault there.
        return Switch(setting="--inject-fault", reason="no fault in the rollout")
    return Switch(
        setting="--inject-fault",
        reason="one ulp added in the rollout, which the gate must notice",
        engine={"true_on_policy_fault": fault.place},
        readback=("true_on_policy_fault",),
    )


def core_groups(cpu_ids: tuple[int, ...], ranks: int) -> str:
    """Cores per rank in SGLang's form, `0-3|4-7`; ranks share cores where there are fewer.

    The engine refuses a list that does not name one group for each tensor-parallel rank.
    """
    assert cpu_ids and ranks >= 1
    width = max(1, len(cpu_ids) // ranks)
    groups = []
    for rank in range(ranks):
        start = rank * width % len(cpu_ids)
        group = cpu_ids[start : start + width]
        contiguous = group == tuple(range(group[0], group[0] + len(group)))
        if contiguous and len(group) > 1:
            groups.append(f"{group[0]}-{group[-1]}")
        else:
            groups.append(",".join(map(str, group)))
    return "|".join(groups)


def _merge(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        assert not twice, f"two switches set {sorted(twice)}"
        merged.update(part)
    return merged


def engine_arguments(table: tuple[Switch, ...]) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`."""
    return _merge([row.engine for row in table])


def engine_readback(table: tuple[Switch, ...]) -> dict[str, Any]:
    """The part of `engine_arguments` that every scheduler must report unchanged after start."""
    arguments = engine_arguments(table)
    return {key: arguments[key] for row in table for key in row.readback}


def transformer_config(table: tuple[Switch, ...]) -> dict[str, Any]:
    """Keyword arguments of Megatron's `TransformerConfig`; dtypes and activation as strings."""
    return _merge([row.config for row in table])


def model_arguments(table: tuple[Switch, ...]) -> dict[str, Any]:
    """Keyword arguments of Megatron's `GPTModel` beside config, layer spec and stage flags."""
    return _merge([row.model for row in table])


def parallel_state(layout: Layout) -> dict[str, Any]:
    """Keyword arguments of `megatron.core.parallel_state.initialize_model_parallel`."""
    return {
        "tensor_model_parallel_size": layout.train_tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }


def environment(
    table: tuple[Switch, ...], role: Role, environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables of one role's processes, given the user's environment.

    Raises `ValueError` naming both values for each variable that the launcher owns and the user
    has set to something else.
    """
    owned = _merge([row.rollout_env if role == "rollout" else row.trainer_env for row in table])
    conflicts = []
    for name, value in owned.items():
        theirs = environ.get(name)
        if theirs is None or theirs == value or name in HIDDEN_VARIABLES:
            continue
        if name in YIELDING_VARIABLES:
            owned[name] = theirs
        else:
            conflicts.append(f"{name}={theirs!r} in your environment, {value!r} for the {role}")
    if conflicts:
        raise ValueError(
            "the launcher owns these variables: " + "; ".join(conflicts) + ". Unset yours"
        )
    return owned


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for each name that the installed SGLang's ServerArgs does not have.

    Imports SGLang (seconds): call it where the engine is started, not while planning.
    """
    import dataclasses

    import sglang
    from sglang.srt.server_args import ServerArgs

    known = {f.name for f in dataclasses.fields(ServerArgs)} | OWN_ENGINE_FIELDS
    unknown = []
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did it become {near[0]}?)" if near else ""
            unknown.append(f"SGLang {sglang.__version__} has no field {name}{hint}")
    if unknown:
        raise ValueError("; ".join(unknown))
