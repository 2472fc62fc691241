"""Weights on their way to the engine: cut, laid side by side, rebuilt by the engine itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_launcher.runtime import weight_sync
from miles_launcher.runtime.cluster import Cluster
from miles_launcher.runtime.session import Session
from miles_launcher.runtime.weight_sync import Bucket, SentBucket, buckets

SHAPES = {"a": (3, 5), "b": (7,), "c": (40, 10), "d": (1,)}


def filled(bucket: Bucket, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    values = {}
    for name, view in bucket.views(flat).items():
        values[name] = torch.randn(view.shape, generator=generator).bfloat16()
        view.copy_(values[name])
    return flat, values


def test_buckets_keep_the_order_and_the_size() -> None:
    cut = buckets(SHAPES, most=60)
    assert [[name for name, _ in bucket.tensors] for bucket in cut] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.num_bytes for bucket in cut] == [44, 800, 2]
    assert [n for bucket in buckets(SHAPES) for n, _ in bucket.tensors] == list(SHAPES)
    assert len(buckets(SHAPES)) == 1


def rebuilt(data: bytes) -> dict[str, torch.Tensor]:
    """As a scheduler rank does it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    found = MultiprocessingSerializer.deserialize(data)
    return dict(
        FlattenedTensorBucket(
            flattened_tensor=found["flattened_tensor"], metadata=found["metadata"]
        ).reconstruct_tensors()
    )


def test_the_engine_rebuilds_the_bits_from_host_memory() -> None:
    [bucket] = buckets(SHAPES)
    flat, values = filled(bucket)
    data = flat.numpy()
    data.flags.writeable = False
    got = rebuilt(weight_sync.payload(bucket, weight_sync.in_shared_memory(data)))
    assert list(got) == list(values)
    for name, value in values.items():
        assert torch.equal(got[name].view(torch.int16), value.view(torch.int16)), name


def test_a_handle_names_its_device_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may see the devices in another order; nothing is opened by who only passes on."""
    from sglang.srt.utils import patch_torch
    from torch.multiprocessing import reductions

    [bucket] = buckets({"a": (2, 3)})
    flat, values = filled(bucket)
    opened: list[Any] = []

    def open_it(*arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return flat

    plain = (torch.Tensor, flat.size(), flat.stride(), 0, torch.UntypedStorage, torch.uint8)
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda tensor: (None, (*plain, 0, b"handle", 12))
    )
    uuids = ["other", "mine"]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            uuid="mine" if isinstance(device, torch.device) else uuids[device]
        ),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    handle = weight_sync._handle(flat)
    assert handle == (*plain, "mine", b"handle", 12)
    data = weight_sync.payload(bucket, handle)
    assert not opened
    patch_torch.monkey_patch_torch_reductions()
    monkeypatch.setattr(reductions, "_rebuild_cuda_tensor_original", open_it)
    got = rebuilt(data)
    assert opened == [(*plain, 1, b"handle", 12)]
    assert torch.equal(got["a"].view(torch.int16), values["a"].view(torch.int16))


class Remote:
    """Stands for an actor's method: what it was called with."""

    def __init__(self, log: list[tuple[Any, ...]], who: str) -> None:
        self.log, self.who = log, who

    def remote(self, *args: Any) -> tuple[Any, ...]:
        call = (self.who, *args)
        self.log.append(call)
        return call


class Calls:
    """A cluster whose calls are done at once: three buckets."""

    def __init__(self, shared: list[int]) -> None:
        self.shared = shared

    def shared_gpus(self) -> list[int]:
        return self.shared

    def wait(self, calls: list[tuple[Any, Any]]) -> list[Any]:
        return [3 if call[1] == "begin_weight_sync" else None for _, call in calls]


# trainer ranks; whom each engine rank shares memory with; then what follows from it.
SHARINGS: list[tuple[Any, ...]] = [
    (2, [], [], [(0, 0), (0, 0)], [0]),
    (1, [0], [(0, 0)], [(1, 1)], [0]),
    (2, [0, 1], [(0, 0), (1, 0)], [(1, 2), (1, 2)], [0, 1]),
    (1, [0, 0], [(0, 0), (0, 1)], [(2, 1)], [0]),
    (2, [0, 1, 0, 0], [(0, 0), (1, 0), (0, 1), (0, 2)], [(3, 2), (1, 2)], [0, 1]),
    (4, [0, 1], [(0, 0), (1, 0)], [(1, 2), (1, 2), (0, 2), (0, 2)], [0, 1]),
]


@pytest.mark.parametrize(
    ("trainers", "shared", "reading", "sends", "read", "engines"),
    [(*s, engines) for s in SHARINGS for engines in (1, 2) if len(s[1]) % engines == 0],
)
def test_every_engine_rank_reads_one_handle_of_its_own(
    trainers: int,
    shared: list[int],
    reading: list[tuple[int, int]],
    sends: list[tuple[int, int]],
    read: list[int],
    engines: int,
) -> None:
    log: list[tuple[Any, ...]] = []
    session = Session.__new__(Session)
    session._cluster = Calls(shared)  # type: ignore[assignment]
    session._trainers = [
        SimpleNamespace(actor=SimpleNamespace(call=Remote(log, f"trainer {rank}")))  # type: ignore[misc]
        for rank in range(trainers)
    ]
    session._engines = [
        SimpleNamespace(actor=SimpleNamespace(update_weights=Remote(log, f"rollout {number}")))  # type: ignore[misc]
        for number in range(engines)
    ]
    session.sync_weights()
    for index in range(3):
        sent = [
            (f"trainer {rank}", "send_weights", index, *arguments)
            for rank, arguments in enumerate(sends)
        ]
        assert [c for c in log if c[1:3] == ("send_weights", index)] == sent
        ranks = len(reading) // engines
        for number in range(engines):
            own = reading[number * ranks : (number + 1) * ranks]
            update = (f"rollout {number}", index == 2, own, *(sent[rank] for rank in read))
            assert log.count(update) == 1
        # Every handle that is made is read by exactly one rank of the engine.
        made = sum(readers for readers, _ in sends)
        assert made == len(reading) == len(set(reading))


@pytest.mark.parametrize(
    ("device", "colocate", "ranks", "shared"),
    [
        ("cuda", True, (2, 2), [0, 1]),
        ("cuda", True, (2, 1), [0, 0]),
        ("cuda", True, (1, 4), [0]),
        ("cuda", False, (2, 2), []),
        ("cpu", True, (2, 2), []),
    ],
)
def test_only_sides_on_the_same_gpus_share_memory(
    device: str, colocate: bool, ranks: tuple[int, int], shared: list[int]
) -> None:
    cluster = Cluster(device=device, num_gpus=4, colocate=colocate, ranks=ranks)
    assert cluster.shared_gpus() == shared


def test_bytes_are_handed_over_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Export:
        tensors = SHAPES

        def gather(self, name: str, out: torch.Tensor | None) -> None:
            if out is not None:
                out.copy_(torch.full(SHAPES[name], float(len(name) + SHAPES[name][0])).bfloat16())

    sent = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sender = weight_sync.WeightSender(Export(), torch.device("cpu"))
        sent.append(sender.send(0, readers=0, sources=0))
    assert sent[1] is None
    assert isinstance(sent[0], SentBucket) and isinstance(sent[0].data, np.ndarray)
    views = sent[0].bucket.views(torch.from_numpy(sent[0].data))
    assert {name: float(view.view(-1)[0]) for name, view in views.items()} == {
        "a": 4.0, "b": 8.0, "c": 41.0, "d": 2.0
    }  # fmt: skip
