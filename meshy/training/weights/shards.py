"""Safetensors files that are written tensor by tensor: no more than one tensor is held at a time."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 4 << 30
HEADER_BYTES = 128 << 10  # kept free at a file's beginning for names and shapes, which are known in the end; ~1000
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Shard:
    """A file that is being written. size: bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.names, self.size = path, list[str](), 0
        self._header = [json.dumps({"__metadata__": {"format": "pt"}})[1:-1]]
        self._room = HEADER_BYTES - len(self._header[0]) - 2
        self.file = path.open("wb")
        self.file.seek(8 + HEADER_BYTES)

    def add(self, name: str, tensor: Tensor) -> bool:
        """Whether there was room for it. Offsets in a file have no gaps, so every tensor must fall on its alignment."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        span = [self.size, self.size + len(raw)]
        entry = json.dumps({name: {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": span}})
        if self.names and (span[1] > SHARD_BYTES or len(entry) > self._room or self.size % tensor.dtype.itemsize):
            return False
        self.file.write(raw)
        self._header.append(entry[1:-1])
        self._room -= len(entry)
        self.names.append(name)
        self.size = span[1]
        return True

    def close(self) -> None:
        self.file.seek(0)
        header = ("{" + ",".join(self._header) + "}").encode().ljust(HEADER_BYTES)
        self.file.write(HEADER_BYTES.to_bytes(8, "little") + header)
        self.file.close()


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[Shard]:
    """Writes model-00001.safetensors and so on, tensors cast to dtype; gives each file when it is whole."""
    shard: Shard | None = None
    count = 0
    try:
        for name, tensor in tensors:
            held = tensor.detach().to(device="cpu", dtype=dtype)
            if shard is not None and shard.add(name, held):
                continue
            if shard is not None:
                shard.close()
                yield shard
            count += 1
            shard = Shard(folder / f"model-{count:05d}.safetensors")
            shard.add(name, held)
        if shard is not None:
            shard.close()
            yield shard
    finally:
        if shard is not None:
            shard.file.close()
