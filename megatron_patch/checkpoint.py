"""Hugging Face safetensors in and out of a sharded model, and digests of what it holds.

Every rank reads only its own blocks. Exporting gathers over tensor and pipeline ranks to rank 0,
one tensor at a time. Weights are bf16 in the folder and in the model: nothing is rounded on the
way, so that both sides' digests can be equal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ModelShape
from .hf_layout import Block, RankPlace, blocks, hf_tensors
from .ops import digest

_INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 << 30


def this_place() -> RankPlace:
    """This process's place, from megatron's parallel state."""
    return RankPlace(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file of a Hugging Face folder holds each tensor; `ValueError` without."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file; is this a Hugging Face model folder?")
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                found.update(dict.fromkeys(handle.keys(), file))
        except SafetensorError as error:
            raise ValueError(f"{file}: not a readable safetensors file ({error})") from error
    return found


class _Folder:
    """Slices of the tensors of one folder, checked against the shape; files stay open."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder, self.expected = folder, hf_tensors(shape)
        self.files = tensor_files(folder)
        self.handles: dict[Path, safe_open] = {}

    def read(self, block: Block) -> torch.Tensor:
        name, wanted = block.name, self.expected[block.name]
        if name not in self.files:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        file = self.files[name]
        if file not in self.handles:
            try:
                self.handles[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} (holds {name}): cannot read it ({error})") from error
        part = self.handles[file].get_slice(name)
        if tuple(part.get_shape()) != wanted or part.get_dtype() != "BF16":
            raise ValueError(
                f"{file}: tensor {name} is {part.get_dtype()} {tuple(part.get_shape())}, the "
                f"model needs BF16 {wanted}"
            )
        rows = slice(*block.rows)
        return part[rows] if block.columns is None else part[rows, slice(*block.columns)]


@torch.no_grad()
def load_hf(
    model: torch.nn.Module, shape: ModelShape, padded_vocab_size: int, folder: Path
) -> None:
    """Fill this rank's parameters from a Hugging Face folder; padding rows become zero.

    model: a (policy or stock) GPTModel. Raises `ValueError` naming the first tensor that is
    missing, of another shape, or not bf16.
    """
    source = _Folder(folder, shape)
    parameters = dict(model.named_parameters())
    filled: dict[str, int] = dict.fromkeys(parameters, 0)
    for block in blocks(shape, this_place(), padded_vocab_size):
        target = parameters[block.parameter]
        if not filled[block.parameter]:
            target.zero_()
        start, stop = block.local_rows
        target[start:stop].copy_(source.read(block))
        filled[block.parameter] += stop - start
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    for name, rows in filled.items():
        if name in tables and rows == 0:
            parameters[name].zero_()
        assert name in tables or rows == parameters[name].shape[0], (name, rows)


def _coordinates() -> list[tuple[int, RankPlace, int]]:
    """(global rank, place, context-parallel rank) of every rank."""
    mine = (dist.get_rank(), this_place(), parallel_state.get_context_parallel_rank())
    everyone: list[tuple[int, RankPlace, int]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _local(parameters: dict[str, torch.nn.Parameter], block: Block) -> torch.Tensor:
    start, stop = block.local_rows
    return parameters[block.parameter].detach()[start:stop].contiguous()


class WeightExport:
    """Whole Hugging Face tensors out of a sharded model, gathered to rank 0 one at a time.

    Collective: every rank makes one and calls `gather` for the same names in the same order; the
    others send and receive nothing. Context-parallel replicas do not send.
    """

    def __init__(self, model: torch.nn.Module, shape: ModelShape, padded_vocab_size: int) -> None:
        self.tensors = hf_tensors(shape)
        self._rank = dist.get_rank()
        self._parameters = dict(model.named_parameters())
        self._held: dict[str, list[tuple[int, Block]]] = {}
        for owner, place, cp_rank in _coordinates():
            if cp_rank == 0:
                for block in blocks(shape, place, padded_vocab_size):
                    if block.counted:
                        self._held.setdefault(block.name, []).append((owner, block))

    @torch.no_grad()
    def gather(self, name: str, out: torch.Tensor | None) -> None:
        """Fill `out` with the tensor `name`: bf16 of its whole shape, on any device, on rank 0;
        elsewhere it is not looked at."""
        for owner, block in self._held[name]:
            if self._rank == owner:
                part = _local(self._parameters, block)
                if self._rank != 0:
                    dist.send(part.view(torch.uint8), dst=0)
            elif self._rank == 0:
                device = next(iter(self._parameters.values())).device
                part = torch.empty(block.size, dtype=torch.bfloat16, device=device)
                dist.recv(part.view(torch.uint8), src=owner)
            if self._rank == 0:
                assert out is not None and tuple(out.shape) == self.tensors[name], name
                rows = slice(*block.rows)
                where = rows if block.columns is None else (rows, slice(*block.columns))
                out[where] = part.to(out.device)


def export_hf(
    model: torch.nn.Module, shape: ModelShape, padded_vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole bf16 tensor on the CPU) on rank 0, in file order.

    Collective: every rank must exhaust the iterator; the others yield nothing.
    """
    export = WeightExport(model, shape, padded_vocab_size)
    for name, size in export.tensors.items():
        whole = torch.empty(size, dtype=torch.bfloat16) if dist.get_rank() == 0 else None
        export.gather(name, whole)
        if whole is not None:
            yield name, whole


@torch.no_grad()
def weights_digest(model: torch.nn.Module, shape: ModelShape, padded_vocab_size: int) -> str:
    """Digest of the whole model's bits by Hugging Face name; collective, the same on every rank.

    Equal to `hf_folder_digest` of a folder with the same weights, at any sharding.
    """
    parameters = dict(model.named_parameters())
    sums: dict[str, int] = {}
    if parallel_state.get_context_parallel_rank() == 0:
        for block in blocks(shape, this_place(), padded_vocab_size):
            if block.counted:
                part = digest.shard_digest(
                    _local(parameters, block), block.rows, block.columns or (0, 1)
                )
                sums[block.name] = sums.get(block.name, 0) + part
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    totals: dict[str, int] = {}
    for shares in everyone:
        for name, value in shares.items():
            totals[name] = totals.get(name, 0) + value
    return digest.weights_digest(totals)


def hf_folder_digest(folder: Path, shape: ModelShape) -> str:
    """The digest of a plain Hugging Face folder, one process, no model.

    Raises `ValueError` as `load_hf` does.
    """
    source = _Folder(folder, shape)
    sums = {}
    for name, size in hf_tensors(shape).items():
        columns = (0, size[1]) if len(size) == 2 else None
        block = Block("", (0, size[0]), name, (0, size[0]), columns)
        sums[name] = digest.shard_digest(source.read(block), block.rows, columns or (0, 1))
    return digest.weights_digest(sums)


def save_hf(
    model: torch.nn.Module,
    shape: ModelShape,
    padded_vocab_size: int,
    folder: Path,
    like: Path | None = None,
) -> None:
    """Write a Hugging Face folder from rank 0; collective.

    Files hold at most about 4 GiB. like: a folder whose other files (config.json, tokenizer) are
    copied. Raises `ValueError` on every rank where `folder` already holds weights.
    """
    occupied = [dist.get_rank() == 0 and any(folder.glob("*.safetensors"))]
    dist.broadcast_object_list(occupied, src=0)
    if occupied[0]:
        raise ValueError(f"{folder} already holds weights; choose another folder")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(like.iterdir()) if like is not None else ():
            weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name == _INDEX
            if file.is_file() and not weights:
                shutil.copyfile(file, folder / file.name)
    files: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal part, size
        save_file(part, folder / f"model-{len(files):05d}.safetensors", {"format": "pt"})
        files.append(list(part))
        part, size = {}, 0

    for name, tensor in export_hf(model, shape, padded_vocab_size):
        if part and size + tensor.nbytes > _FILE_BYTES:
            flush()
        part[name] = tensor
        size += tensor.nbytes
    if part:
        flush()
        _name_files(folder, files)
    dist.barrier()


def _name_files(folder: Path, files: list[list[str]]) -> None:
    """Rename to the names that loaders expect, and write an index where there are several."""
    if len(files) == 1:
        (folder / "model-00000.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"model-{i:05d}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
