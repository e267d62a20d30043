"""Stand-in for the compiled `sgl_kernel` of SGLang's CPU build, which PyPI does not offer.

One function is real; the others let SGLang be imported and raise if they are ever called, which serving Qwen3, Qwen2 or
Llama in fp32 does not do.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+cpu"
__path__: list[str] = []


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new cache places into its row of the token table, from `start` to `end`."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def _missing(name: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: not in the CPU stand-in; this model or option needs a GPU")

    missing.__name__ = name
    return missing


_IMPORTED_BY_NAME = {
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
    "copy_all_layer_kv_cache_cpu",
}


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in _IMPORTED_BY_NAME:
        return _missing(name)
    raise AttributeError(name)


mamba = types.ModuleType("sgl_kernel.mamba")
for _name in ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"):
    setattr(mamba, _name, _missing(_name))
sys.modules["sgl_kernel.mamba"] = mamba
