"""Gradient of the targets' logprobs with respect to the logits."""
