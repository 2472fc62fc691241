"""`make gpu-gate`: the configurations that fit this machine, each to exact zero, with controls."""
