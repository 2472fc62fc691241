"""Linear layers whose K is never cut: qkv, gate_up, lm_head."""
