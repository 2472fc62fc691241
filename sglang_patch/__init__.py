"""SGLang plugin: the rollout side of true on-policy reinforcement learning."""
