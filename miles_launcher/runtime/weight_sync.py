"""New weights from the trainer to the engine, bucket by bucket, by the engine's own interface.

Where an engine rank and a trainer rank share a GPU, a bucket stays in its memory and only a handle
travels (CUDA IPC); elsewhere it travels as bytes through Ray's object store. No bit can change on
the way, and the digests of both sides are compared after it.

Upstream surfaces: `sglang.Engine.update_weights_from_tensor` with `load_format="flattened_bucket"`,
`sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata`,
`sglang.srt.utils.patch_torch`, which names a shared tensor's device by its UUID.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

BUCKET_BYTES = 1 << 29
_DTYPE = torch.bfloat16
# Where `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes the device's index.
_DEVICE_ARGUMENT = 6


@dataclass(frozen=True, slots=True)
class Bucket:
    """Names and shapes of bf16 tensors that lie one after another in a buffer of bytes."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors) * _DTYPE.itemsize

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of `flat`, [num_bytes] uint8."""
        found, start = {}, 0
        for name, shape in self.tensors:
            end = start + math.prod(shape) * _DTYPE.itemsize
            found[name] = flat[start:end].view(_DTYPE).view(shape)
            start = end
        return found


@dataclass(frozen=True, slots=True)
class SentBucket:
    """What one trainer rank hands over: the bytes, or a handle for each reader on its GPU."""

    bucket: Bucket
    data: np.ndarray | None = None
    handles: tuple[tuple[Any, ...], ...] = ()


def buckets(tensors: Mapping[str, tuple[int, ...]], most: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut the tensors, in order, into buckets of at most `most` bytes; a larger tensor is a bucket
    of its own."""
    found: list[list[tuple[str, tuple[int, ...]]]] = []
    size = most + 1
    for name, shape in tensors.items():
        bytes_ = math.prod(shape) * _DTYPE.itemsize
        if size + bytes_ > most:
            found.append([])
            size = 0
        found[-1].append((name, shape))
        size += bytes_
    return [Bucket(tuple(bucket)) for bucket in found]


class WeightSender:
    """A trainer rank's end. `export` is a `megatron_patch.checkpoint.WeightExport`; every rank
    makes one and sends the same buckets."""

    def __init__(self, export: Any, device: torch.device) -> None:
        self._export, self._device = export, device
        self.buckets = buckets(export.tensors)
        # The bucket that readers may still be copying from, until the next one is asked for.
        self._shared: torch.Tensor | None = None

    def send(self, index: int, readers: int, sources: int) -> SentBucket | None:
        """Gather bucket `index` on rank 0 and hand it over.

        readers: how many engine ranks read it from this rank's GPU memory; sources: how many
        trainer ranks have such readers; with 0 sources rank 0 hands over the bytes.
        """
        bucket, rank = self.buckets[index], dist.get_rank()
        self._shared = None
        flat = None
        if rank == 0 or sources > 1:
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        views = {} if flat is None else bucket.views(flat)
        for name, _ in bucket.tensors:
            self._export.gather(name, views.get(name))
        if sources > 1:
            assert flat is not None
            dist.broadcast(flat, src=0)
        if sources == 0:
            return None if flat is None else SentBucket(bucket, data=flat.cpu().numpy())
        if readers == 0:
            return SentBucket(bucket)
        assert flat is not None
        torch.cuda.synchronize(self._device)
        self._shared = flat
        return SentBucket(bucket, handles=tuple(_handle(flat) for _ in range(readers)))

    def close(self) -> None:
        """Nobody reads any more."""
        self._shared = None


def _handle(flat: torch.Tensor) -> tuple[Any, ...]:
    """What rebuilds `flat` in another process; one for each reader, which PyTorch counts."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(flat)
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


class _Shared:
    """Pickles as the tensor behind a handle, without opening it here."""

    def __init__(self, handle: tuple[Any, ...]) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified

        return _rebuild_cuda_tensor_modified, self._handle


def payload(bucket: Bucket, source: Any) -> bytes:
    """What one engine rank is given: `source` is a handle, or a tensor in shared host memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, shape in bucket.tensors:
        numel = math.prod(shape) * _DTYPE.itemsize
        metadata.append(
            FlattenedTensorMetadata(
                name=name,
                shape=torch.Size(shape),
                dtype=_DTYPE,
                start_idx=start,
                end_idx=start + numel,
                numel=numel,
            )
        )
        start += numel
    flat = _Shared(source) if isinstance(source, tuple) else source
    serialized: bytes = MultiprocessingSerializer.serialize(
        {"flattened_tensor": flat, "metadata": metadata}
    )
    return serialized


def in_shared_memory(data: np.ndarray) -> torch.Tensor:
    """A copy that the engine's processes can map; `data`, from Ray's store, is read-only."""
    shared = torch.empty(data.shape, dtype=torch.uint8).share_memory_()
    shared.numpy()[:] = data
    return shared
