"""The launcher: from a model name and a layout to a written plan, and from the plan to a run.

Importing this package loads nothing but the standard library. `cli.py` is the command line,
`plan.py` the written plan; `runtime/` starts from it and `parity/` judges it.
"""

__version__ = "0.1.0"
