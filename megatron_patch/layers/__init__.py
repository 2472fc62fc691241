"""Layer classes that megatron-core builds from our spec; each wraps one differentiable op."""
