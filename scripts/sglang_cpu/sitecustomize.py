"""Lets PyPI's torchvision (a CUDA build) be imported beside a CPU build of torch.

Its import insists on two operators that its own library would register; their schemas are declared here just before.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global _library  # it unregisters what it defines when it is collected
            _library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
