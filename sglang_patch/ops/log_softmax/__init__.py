"""Log-softmax over fixed segments of the real vocabulary."""
