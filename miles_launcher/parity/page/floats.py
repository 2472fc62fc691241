"""The bits of a number, as the fields of its format and as a decimal."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """Widths of exponent and mantissa; one sign bit stands before them."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        """The whole width."""
        return 1 + self.exponent + self.mantissa


FORMATS = {
    "bfloat16": Format(8, 7),
    "float16": Format(5, 10),
    "float32": Format(8, 23),
    "float64": Format(11, 52),
}
_CODES = {"float16": (">e", 2), "float32": (">f", 4), "float64": (">d", 8)}


def fields(digits: str, dtype: str) -> tuple[str, str, str]:
    """(sign, exponent, mantissa) as binary digits, of a number in hexadecimal digits."""
    form = FORMATS[dtype]
    binary = f"{int(digits, 16):0{form.bits}b}"
    return binary[0], binary[1 : 1 + form.exponent], binary[1 + form.exponent :]


def value(digits: str, dtype: str) -> float:
    """The number itself; every one of these formats is exact in Python's float."""
    # A bfloat16 is the upper half of a float32.
    digits, dtype = (digits + "0000", "float32") if dtype == "bfloat16" else (digits, dtype)
    code, size = _CODES[dtype]
    number: float = struct.unpack(code, int(digits, 16).to_bytes(size, "big"))[0]
    return number


def decimal(number: float, dtype: str) -> str:
    """With as many digits as tell two neighbours of the format apart."""
    if number != number:
        return "NaN (not a number)"
    if number in (float("inf"), float("-inf")):
        return "+infinity" if number > 0 else "-infinity"
    return repr(number) if dtype == "float64" else f"{number:.9g}"
