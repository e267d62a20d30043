import weakref

import pytest
import torch

from meshy.training.weights.buckets import Bucket, Halves, fill


def tensors(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(len(sizes))
    return [(f"t{i}", torch.randn(size, generator=g)) for i, size in enumerate(sizes)]


def buckets_of(named, size: int, dtype=torch.float32, align: int = 1) -> tuple[list[Bucket], Halves]:
    """What a reader would have copied, bucket by bucket, before the memory is used again."""
    memory = Halves(lambda n: torch.empty(n, dtype=torch.uint8), size)
    copies = []
    for bucket in fill(named, dtype, memory.region, align):
        copies.append(Bucket(bucket.entries, bucket.dtype, bucket.data.clone(), bucket.last))
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
        assert all(entry.offset % align == 0 for bucket in copies for entry in bucket.entries)


def test_without_alignment_the_bytes_lie_without_a_gap():
    (bucket,), _ = buckets_of(tensors(3, 50, 1), 1 << 20)
    assert bucket.data.equal(torch.cat([t for _, t in tensors(3, 50, 1)]).view(torch.uint8))


def test_a_tensor_larger_than_a_half_takes_the_whole_segment_and_a_larger_one_makes_it_grow():
    copies, memory = buckets_of(tensors(4, 40, 4), 256)
    assert memory.size == 256 and [len(b.entries) for b in copies] == [1, 2]
    copies, memory = buckets_of(tensors(4, 200, 4), 256)
    assert memory.size == 896 and [len(b.data) for b in copies] == [16, 816]


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
