"""How a group's messages travel: decided once per group, and told; never changed by an error."""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import torch
import torch.distributed as dist

from ..formats import require
from .workspace import ONE_SHOT_BYTES, STAGED_BYTES, WORLD_SIZES, Areas, Workspace

Form = Literal["symmetric memory", "process group"]
Chosen: TypeAlias = Form | Literal["auto"]

# Environment of every rank: a form in place of "auto", for machines that cannot do what they claim.
VARIABLE: Final = "TRUE_ON_POLICY_RANK_SUMS"

# How often each form was called (a captured graph calls once); for readbacks and tests.
form_calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """`form` with the `reason` for it; `workspace` exactly where it is symmetric memory."""

    form: Form
    reason: str
    workspace: Workspace | None = None

    def describe(self) -> str:
        """One line for a readback: `symmetric memory (4 GPUs linked by NVLink)`."""
        return f"{self.form} ({self.reason})"


_UNCONNECTED: Final = Transport("process group", "nothing else was asked for")
_CONNECTED: weakref.WeakKeyDictionary[Any, Transport] = weakref.WeakKeyDictionary()


def transport_of(group: Any) -> Transport:
    """The group's transport; its own collectives where `connect` was not called."""
    return _UNCONNECTED if group is None else _CONNECTED.get(group, _UNCONNECTED)


def describe_all() -> list[str]:
    """`Transport.describe` of every group that was connected in this process."""
    return [transport.describe() for transport in _CONNECTED.values()]


def connect(
    group: Any,
    device: torch.device,
    form: Chosen | None = None,
    *,
    one_shot_bytes: int | None = None,
    staged_bytes: int = STAGED_BYTES,
) -> Transport:
    """Decide how sums over `group` (a torch process group, None: one rank) travel on `device`.

    Collective, once per group: later calls return what was decided. `form` None is what the
    environment's TRUE_ON_POLICY_RANK_SUMS says, or "auto": symmetric memory where every rank's GPU
    is its own, on one host, and linked by NVLink to the others. Whatever then fails raises. Memory:
    at most 1.5 stages and 2 * size one-shot messages a rank (272 MiB by default). Raises
    `ValueError` for symmetric memory asked for where it cannot be.
    """
    if group is None or dist.get_world_size(group) == 1:
        return _UNCONNECTED
    if group in _CONNECTED:
        return _CONNECTED[group]
    size = dist.get_world_size(group)
    require(
        size in WORLD_SIZES,
        f"tree_all_reduce: {size} ranks; the ranks' tree is over 1, 2, 4 or 8",
    )
    form = _chosen(form)
    obstacle, reason = "", "asked for"
    if form == "auto":
        obstacle, reason = _obstacle(group, device)
    if form == "process group" or obstacle:
        made = Transport("process group", obstacle or reason)
    else:
        require(
            device.type == "cuda",
            f"tree_all_reduce: symmetric memory on {device}; it needs GPUs (process group here)",
        )
        areas = Areas(size, one_shot_bytes or ONE_SHOT_BYTES[size], staged_bytes)
        made = Transport("symmetric memory", reason, _symmetric(group, device, areas))
    _CONNECTED[group] = made
    return made


def _chosen(form: Chosen | None) -> Chosen:
    found = form or os.environ.get(VARIABLE, "auto")
    require(
        found in ("auto", "symmetric memory", "process group"),
        f"{VARIABLE}={found!r}: choose from 'auto', 'symmetric memory', 'process group'",
    )
    return cast(Chosen, found)


def _obstacle(group: Any, device: torch.device) -> tuple[str, str]:
    """(why the ranks cannot map each other's memory or '', what lets them otherwise), the same on
    every rank."""
    mine: dict[str, Any] = {"device": device.type, "host": _host()}
    index: Any = device.index
    if device.type == "cuda":
        index = torch.cuda.current_device() if index is None else index
        mine["gpu"] = str(torch.cuda.get_device_properties(index).uuid)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    hosts = {rank["host"] for rank in everyone}
    gpus: list[Any] = [rank.get("gpu") for rank in everyone]
    if any(rank["device"] != "cuda" for rank in everyone):
        found = f"ranks on {mine['device']}"
    elif len(hosts) > 1:
        found = f"ranks on {len(hosts)} hosts"
    elif len(set(gpus)) < len(gpus):
        found = f"{len(gpus)} ranks on {len(set(gpus))} GPUs"
    else:
        found = _unlinked(index, gpus)
    # What one rank sees another may not: the first obstacle in rank order is everybody's.
    answers: list[Any] = [None] * len(everyone)
    dist.all_gather_object(answers, found, group=group)
    return next(filter(None, answers), ""), f"{len(gpus)} GPUs linked by NVLink"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def _unlinked(index: int, gpus: list[Any]) -> str:
    """Why this rank cannot reach one of the GPUs, or ''."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    ordinals = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    # torch's stubs leave it out.
    detect: Any = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
    links = detect(DeviceType.CUDA, "nvlink").matrix
    for rank, gpu in enumerate(gpus):
        other = ordinals.get(gpu)
        if other == index:
            continue
        if other is None:
            return f"the GPU of rank {rank} is hidden from another rank (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(index, other):
            return f"GPU {index} cannot map the memory of GPU {other}"
        if not links[index][other]:
            # Flags are set by atomic exchanges, which PCI Express does not carry to a peer.
            return f"no NVLink between GPUs {index} and {other}"
    return ""


def _symmetric(group: Any, device: torch.device, areas: Areas) -> Workspace:
    """Allocate this rank's buffer, map the others'. Multicast stays off: nothing here uses it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    backend = symmetric_memory.get_backend(device)
    require(
        backend == "CUDA",
        f"tree_all_reduce: torch's symmetric memory is {backend} here; unset TORCH_SYMMMEM",
    )
    buffer = symmetric_memory.empty(areas.total, dtype=torch.uint8, device=device)
    buffer[: areas.received].zero_()
    try:
        handle = symmetric_memory.rendezvous(buffer, group)
    except RuntimeError as error:
        raise ValueError(
            f"tree_all_reduce: the ranks' memory could not be mapped ({error}); to do without, set "
            f"{VARIABLE}='process group' for every rank"
        ) from error
    rank = dist.get_rank(group)
    buffers = [
        buffer if peer == rank else handle.get_buffer(peer, (areas.total,), torch.uint8)
        for peer in range(areas.world)
    ]
    # Nobody may arrive before everybody's flags are zero.
    torch.cuda.synchronize(device)
    dist.all_gather_object([None] * areas.world, None, group=group)
    return Workspace(rank, areas, buffers, owner=handle)
