"""The layer classes that megatron-core asks a backend for, and the spec built from them."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from .config import PolicyTransformerConfig
from .layers.attention import PolicyCoreAttention, PolicySelfAttention
from .layers.linear import PolicyColumnLinear, PolicyRowLinear
from .layers.mlp import PolicyMLP
from .layers.norm import PolicyFinalNorm, PolicyRMSNorm
from .layers.transformer_layer import PolicyTransformerLayer


class SGLangSpecProvider(BackendSpecProvider):
    """Layers that add in the rollout's order (`megatron.core.models.backends`)."""

    def column_parallel_linear(self) -> type:
        return PolicyColumnLinear

    def row_parallel_linear(self) -> type:
        return PolicyRowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        if not rms_norm:
            raise ValueError("SGLangSpecProvider: only RMSNorm is covered; set normalization")
        return PolicyRMSNorm

    def core_attention(self) -> type:
        return PolicyCoreAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        raise ValueError("SGLangSpecProvider: no contract covers mixture-of-experts layers")

    def activation_func(self) -> type | None:
        return None


def layer_spec(config: PolicyTransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm, for `TransformerBlock`."""
    backend = SGLangSpecProvider()
    norm = backend.layer_norm(rms_norm=True)
    qk_norm = backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=PolicyTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PolicySelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=backend.core_attention(),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            pre_mlp_layernorm=norm,
            mlp=PolicyMLP,
        ),
    )
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=PolicyFinalNorm)
