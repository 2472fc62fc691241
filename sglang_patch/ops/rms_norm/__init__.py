"""RMSNorm with an fp32 residual stream."""
