"""`python3 -m miles_launcher.conformance`: `miles conform` with torch and Triton alone.

From the repository root; it imports neither typer, rich nor an engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_CONFIGURATION = 2


def main() -> int:
    """The exit code of `miles conform`."""
    parser = argparse.ArgumentParser(
        prog="python3 -m miles_launcher.conformance", allow_abbrev=False
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--op", action="append", default=[], help="an op; may be repeated")
    parser.add_argument("--out", type=Path, help="folder for the certificate")
    parser.add_argument("--quick", action="store_true", help="small sizes; certifies nothing")
    arguments = parser.parse_args()

    from .run import conform
    from .table import PlainView

    try:
        return conform(
            device=arguments.device,
            ops=arguments.op,
            out=arguments.out,
            quick=arguments.quick,
            view=PlainView(),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
