import weakref

import pytest
import torch

from meshy.training.weights.buckets import Bucket, Halves, Unpacked, fill


def tensors(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(len(sizes))
    return [(f"t{i}", torch.randn(size, generator=g)) for i, size in enumerate(sizes)]


def buckets_of(
    named, size: int, dtype=torch.float32, align: int = 1, unpacked: Unpacked | None = None
) -> tuple[list[Bucket], Halves]:
    """What a reader would have copied, bucket by bucket, before the memory is used again."""
    memory = Halves(lambda n: torch.empty(n, dtype=torch.uint8), size)
    copies = []
    for bucket in fill(named, dtype, memory.region, align, unpacked):
        tensors = tuple((name, tensor.clone()) for name, tensor in bucket.tensors)
        packed = bucket.packed.clone() if bucket.packed is not None else None
        copies.append(Bucket(tensors, bucket.dtype, packed, bucket.last))
    return copies, memory


@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_cast_and_in_order_whatever_the_cut(align, dtype):
    named = tensors(3, 50, 1, 7, 300, 2, 20, 64, 65)
    for size in (128, 256, 512, 1 << 20):
        copies, _ = buckets_of(named, size, dtype, align)
        arrived = [item for bucket in copies for item in bucket.tensors]
        assert [name for name, _ in arrived] == [name for name, _ in named]
        assert all(torch.equal(got, sent.to(dtype)) for (_, got), (_, sent) in zip(arrived, named, strict=True))
        assert [bucket.last for bucket in copies] == [False] * (len(copies) - 1) + [True]


def test_every_packed_tensor_begins_at_a_multiple_of_the_alignment():
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    (bucket,) = fill(tensors(3, 50, 1, 7), torch.float32, lambda size: memory, 64)
    assert [tensor.data_ptr() - memory.data_ptr() for _, tensor in bucket.tensors] == [0, 64, 320, 384]


@pytest.mark.parametrize("sizes", [(3, 50, 1, 70, 300, 2, 20, 64, 65), (100, 100), (100,), (3, 100), (100, 3), (3,)])
def test_large_tensors_travel_from_where_they_lie(sizes):
    named = tensors(*sizes)
    named.append(("wide", torch.randn(10, 20).t()))
    unpacked = Unpacked(least=256, most=600, device=torch.device("cpu"))
    buckets = list(fill(named, torch.float32, lambda size: torch.empty(4096, dtype=torch.uint8), 1, unpacked))
    assert {name: tensor for bucket in buckets for name, tensor in bucket.tensors}.keys() == dict(named).keys()
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    for bucket in buckets:
        for name, tensor in bucket.tensors:
            sent = dict(named)[name]
            assert tensor.equal(sent) and tensor.is_contiguous()
            assert (tensor.nbytes >= 256) == (bucket.packed is None)
            assert (tensor.data_ptr() == sent.data_ptr()) == (bucket.packed is None and sent.is_contiguous())
        if bucket.packed is None:
            assert bucket.bytes <= 600 or len(bucket.tensors) == 1


def test_large_tensors_are_cast_too():
    unpacked = Unpacked(least=4, most=600, device=torch.device("cpu"))
    (bucket,) = buckets_of(tensors(100), 128, torch.bfloat16, 1, unpacked)[0]
    assert bucket.packed is None and bucket.bytes == 200
    assert bucket.tensors[0][1].equal(tensors(100)[0][1].to(torch.bfloat16))


def test_without_alignment_the_bytes_lie_without_a_gap():
    (bucket,), _ = buckets_of(tensors(3, 50, 1), 1 << 20)
    assert bucket.packed is not None and bucket.packed.equal(
        torch.cat([t for _, t in tensors(3, 50, 1)]).view(torch.uint8)
    )


def test_a_tensor_larger_than_a_half_takes_the_whole_segment_and_a_larger_one_makes_it_grow():
    copies, memory = buckets_of(tensors(4, 40, 4), 256)
    assert memory.size == 256 and [len(b.tensors) for b in copies] == [1, 2]
    copies, memory = buckets_of(tensors(4, 200, 4), 256)
    assert memory.size == 896 and [b.bytes for b in copies] == [16, 816]


def test_memory_is_waited_for_only_while_somebody_reads_it():
    memory = Halves(lambda n: torch.empty(n, dtype=torch.uint8), 256)
    read: list[str] = []
    first = memory.region(100)
    memory.lend(lambda: read.append("first"))
    second = memory.region(100)
    assert not read and first.data_ptr() != second.data_ptr()
    memory.lend(lambda: read.append("second"))
    assert memory.region(100).data_ptr() == first.data_ptr() and read == ["first"]
    memory.lend(lambda: read.append("third"))
    memory.region(200)
    assert read == ["first", "second", "third"]
    memory.lend(lambda: read.append("whole"))
    memory.region(100)
    assert read[-1] == "whole"


def test_no_tensors_make_no_bucket():
    assert buckets_of([], 128)[0] == []


def test_a_segment_that_grows_is_given_back_before_there_is_a_larger_one():
    segments: list[weakref.ref[torch.Tensor]] = []

    def allocate(size: int) -> torch.Tensor:
        assert all(segment() is None for segment in segments)
        memory = torch.empty(size, dtype=torch.uint8)
        segments.append(weakref.ref(memory))
        return memory

    halves = Halves(allocate, 128)
    for bucket in fill([("small", torch.ones(8)), ("large", torch.ones(100))], torch.float32, halves.region):
        halves.lend(lambda: None)
        del bucket
    assert len(segments) == 2
