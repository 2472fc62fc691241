"""The norm of every query and key head and its rotary position embedding, in one launch."""
