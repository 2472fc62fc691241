"""What both sides compare before the first token: one digest over everything that sets bits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The inputs of the numbers on one side. Two sides are comparable when all fields are equal.

    `schema_digest` and `ops_digest` are SHA-256 over the vendored files (hex), `rope_digest` over
    the bytes of the fp32 cos/sin table, `attention` is the path of the attention (`fa3`, `triton`
    or `reference`), `device` is the GPU's name or `cpu`, `versions` the
    libraries that compile or execute the shared ops.
    """

    contract: str
    contract_digest: str
    segments: int
    rollout_tensor_parallel_size: int
    schema_digest: str
    ops_digest: str
    rope_digest: str
    attention: str
    device: str
    versions: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """SHA-256 (64 hex digits) over all fields."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values, with the digest under `digest`."""
        fields = asdict(self)
        fields["versions"] = dict(self.versions)
        return {**fields, "digest": self.digest()}

    def differences(self, other: Fingerprint) -> list[str]:
        """`field: mine != theirs` for every field that differs."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{k}: {mine[k]!r} != {theirs[k]!r}" for k in mine if mine[k] != theirs[k]]


def text_digest(files: dict[str, bytes]) -> str:
    """SHA-256 (64 hex digits) over named file contents, independent of the order given."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
