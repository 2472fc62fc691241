"""Linear layers whose K tensor parallelism cuts: o_proj, down_proj."""
