"""Differentiable Megatron-core layers that reproduce the rollout's numbers."""
