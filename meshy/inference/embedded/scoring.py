"""Log-probs beside those of the sampled tokens: of a prompt's tokens, of the likeliest tokens, of chosen ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.inference.embedded.batch import InputRows
from meshy.inference.embedded.request import Request

Scored = list[tuple[float, int]]  # (log-prob, token id)


def append_candidates(requests: Sequence[Request], logprobs: Float[Tensor, "rows vocab"]) -> None:
    """Top and chosen-id log-probs of the token about to be appended, for the requests that want them."""
    for row, request in enumerate(requests):
        options = request.logprob_options
        if options.top:
            request.output_top.append(top(logprobs[row], options.top))
        if options.token_ids:
            request.output_ids_logprobs.append(at_ids(logprobs[row], options.token_ids))


def score_inputs(inputs: Sequence[InputRows], logits: Float[Tensor, "rows vocab"]) -> None:
    """Log-probs of prompt tokens, of the unscaled distribution; the first of them has none."""
    for request, first, start, stop in inputs:
        logprobs = torch.log_softmax(logits[start:stop], dim=-1)
        following = torch.tensor(request.prompt[first:], dtype=torch.int64, device=logits.device)
        chosen = logprobs.gather(1, following[:, None])[:, 0]
        request.input_logprobs = [None, *chosen.tolist()]
        options = request.logprob_options
        if options.top:
            request.input_top = [None, *(top(row, options.top) for row in logprobs)]
        if options.token_ids:
            request.input_ids_logprobs = [None, *(at_ids(row, options.token_ids) for row in logprobs)]


def top(logprobs: Float[Tensor, " vocab"], count: int) -> Scored:
    """The `count` largest, largest first."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def at_ids(logprobs: Float[Tensor, " vocab"], ids: tuple[int, ...]) -> Scored:
    return list(zip(logprobs[list(ids)].tolist(), ids, strict=True))
