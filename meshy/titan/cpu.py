"""What TorchTitan 0.3.0 needs in order to run on a machine without an accelerator. All such differences stand here."""

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshy.device import device_kind


def announce_cpu() -> None:
    """Before torchtitan is imported: it reads its device type once and takes "cuda" where torch names none."""
    if device_kind() == "cpu":
        torch._utils._get_available_device_type = lambda: "cpu"


def reduce_by_plain_sum(model: nn.Module) -> None:
    """After FSDP is applied: gloo cannot scale while it reduces, which FSDP asks for by default."""
    if device_kind() == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
