"""Rotary position embedding from one fp32 table."""
