"""Tensors go to another process by the name of their segment, and nothing of them stays behind."""

from __future__ import annotations

import base64
import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from meshy.generation.shared_tensors import PayloadError, SegmentError, SegmentReader, SharedSegment, align

ROOM = Path("/dev/shm")


def segments(pid: int) -> set[Path]:
    return set(ROOM.glob(f"torch_{pid}_*"))


def until(condition, what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"waited 30 s for {what}"
        time.sleep(0.01)


def filled(segment: SharedSegment) -> list[tuple[str, torch.Tensor]]:
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.arange(6).view(2, 3), torch.tensor(2.5)]
    named, offset = [], 0
    for number, tensor in enumerate(tensors):
        view = segment.view(offset, tensor.shape, tensor.dtype)
        view.copy_(tensor)
        named.append((f"t{number}", view))
        offset = align(offset + tensor.nbytes)
    return named


def test_views_arrive_as_views():
    segment, reader = SharedSegment(1024), SegmentReader()
    sent = filled(segment)
    payload = segment.payload(sent, receivers=1)
    got = reader.read(payload)
    assert [name for name, _ in got] == [name for name, _ in sent]
    assert all(
        a.dtype == b.dtype and a.shape == b.shape and a.equal(b) for (_, a), (_, b) in zip(sent, got, strict=True)
    )
    sent[0][1].fill_(7)
    assert got[0][1].eq(7).all()
    again = reader.read(payload)  # mapped once: the same memory
    assert again[0][1].data_ptr() == got[0][1].data_ptr()


def test_torch_itself_reads_it_as_often_as_it_is_sent():
    segment = SharedSegment(1024)
    sent = filled(segment)
    for _ in range(3):
        got = pickle.loads(base64.b64decode(segment.payload(sent, receivers=1)))
        assert all(a.equal(b) for (_, a), (_, b) in zip(sent, got, strict=True))
        del got
        reductions.shared_cache.clear()
    assert segments(os.getpid())


def test_a_segment_goes_with_its_object_and_a_reader_keeps_two():
    reader = SegmentReader()
    gc.collect()
    before = segments(os.getpid())
    for number in range(4):
        segment = SharedSegment(1024)
        (named,) = reader.read(
            segment.payload([("t", segment.view(0, (2,), torch.float32).fill_(number))], receivers=1)
        )
        assert named[1].eq(number).all() and len(segments(os.getpid()) - before) == 1
        payload = segment.payload([("t", segment.view(0, (2,), torch.float32))], receivers=1)
        del segment
        gc.collect()
        assert segments(os.getpid()) == before
        with pytest.raises(PayloadError, match="not on this host, or no longer"):
            reader.read(payload)
    assert len(reader._mapped) == 2


@pytest.mark.e2e
def test_nothing_stays_when_its_owner_is_killed():
    script = (
        "from meshy.generation.shared_tensors import SharedSegment\n"
        "segment = SharedSegment(1 << 20); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "ready\n" and len(segments(owner.pid)) == 1
    os.killpg(owner.pid, 9)
    owner.wait(10)
    until(lambda: not segments(owner.pid), "the segment to go")
    assert owner.stdout.read() == ""  # whoever had its standard output has ended too
    owner.stdin.close()
    owner.stdout.close()


def test_no_room_is_told():
    with pytest.raises(SegmentError, match="--shm-size"):
        SharedSegment(1 << 50)


def test_a_tensor_elsewhere_is_refused():
    segment = SharedSegment(64)
    with pytest.raises(ValueError, match="t does not lie in the shared segment"):
        segment.payload([("t", torch.zeros(2))], receivers=1)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def storage(name: bytes, size: int = 64):
    class Storage:
        def __reduce__(self):
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, b"manager", name, size)

    return Storage()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Evil(), "posix.system may not stand in a payload"),
        ([("t", torch.float32)], "must be a list of pairs"),
        ({"flattened_tensor": 1}, "must be a list of pairs"),
        ([("t", storage(b"/../etc/passwd"))], "does not name a shared memory segment"),
        ([("t", storage(b"etc"))], "does not name a shared memory segment"),
        ([("t", storage(b"/torch_1_2_3"))], "/dev/shm/torch_1_2_3 is not on this host"),
        ([("t", storage("text"))], "cannot be read"),
    ],
)
def test_payloads_that_hold_anything_else_are_refused(value, message):
    with pytest.raises(PayloadError, match=message):
        SegmentReader().read(base64.b64encode(pickle.dumps(value)).decode())


@pytest.mark.parametrize("payload", ["", "no base64", base64.b64encode(b"no pickle").decode()])
def test_payloads_that_are_none_are_refused(payload):
    with pytest.raises(PayloadError, match="cannot be read"):
        SegmentReader().read(payload)


def test_a_view_beyond_its_segment_is_refused():
    segment = SharedSegment(64)
    payload = base64.b64decode(segment.payload([("t", segment.view(0, (16,), torch.float32))], receivers=1))
    assert payload.count(b"K\x10") == 1
    with pytest.raises(PayloadError, match="cannot be read"):
        SegmentReader().read(base64.b64encode(payload.replace(b"K\x10", b"K\xff")).decode())


def test_the_strategy_that_sglang_cannot_read_is_refused_in_words():
    class Descriptor:
        def __reduce__(self):
            return reductions.rebuild_storage_fd, (torch.UntypedStorage, None, 64)

    with pytest.raises(PayloadError, match=r'set_sharing_strategy\("file_system"\)'):
        SegmentReader().read(base64.b64encode(pickle.dumps([("t", Descriptor())])).decode())
