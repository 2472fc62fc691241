"""One file per SGLang surface. Each lists its `HOOKS`; `plugin.py` checks and registers them."""
