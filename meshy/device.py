"""The one place that decides which kind of device this machine computes on."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cuda", "cpu"]


def device_kind() -> DeviceKind:
    """`cuda` where a GPU can be used, else `cpu`. `MESHY_DEVICE=cpu` forces slots of CPU on a machine with GPUs."""
    forced = os.environ.get("MESHY_DEVICE")
    if forced not in (None, "cuda", "cpu"):
        raise ValueError(f"MESHY_DEVICE={forced!r}: write 'cuda' or 'cpu', or leave it unset")
    if forced == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if forced == "cuda":
        raise RuntimeError("MESHY_DEVICE=cuda, but torch sees no GPU on this machine")
    return "cpu"


def distributed_backend() -> Literal["nccl", "gloo"]:
    """The backend of compute process groups on this machine's device."""
    return "nccl" if device_kind() == "cuda" else "gloo"


def give_back(device: torch.device) -> None:
    """Return what was freed on that device to the system: allocators keep it for the next one who asks them."""
    import torch

    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
        trim(0)
