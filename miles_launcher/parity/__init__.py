"""Compare bits, fail closed, say what was found. Nothing here imports torch or an engine."""
