"""Log-probs beside those of the sampled tokens: of a prompt's tokens, of the likeliest tokens, of chosen ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from meshy.inference.embedded.batch import InputRows
from meshy.inference.embedded.request import Request, Scored


def append_candidates(requests: Sequence[Request], logprobs: Float[Tensor, "rows vocab"]) -> None:
    """Top and chosen-id log-probs of the token about to be appended, for the requests that want them."""
    rows_of: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        options = request.logprob_options
        if options.top:
            rows_of.setdefault(options.top, []).append(row)
        if options.token_ids:
            request.output_ids_logprobs.append(at_ids(logprobs[row], options.token_ids))
    for count, rows in rows_of.items():
        few = logprobs if len(rows) == len(requests) else logprobs[rows]
        for row, scored in zip(rows, top(few, count), strict=True):
            requests[row].output_top.append(scored)


def score_inputs(inputs: Sequence[InputRows], logits: Float[Tensor, "rows vocab"]) -> None:
    """Log-probs of prompt tokens, of the unscaled distribution; the first of them has none."""
    for request, first, start, stop in inputs:
        logprobs = torch.log_softmax(logits[start:stop], dim=-1)
        following = torch.tensor(request.prompt[first:], dtype=torch.int64, device=logits.device)
        chosen = logprobs.gather(1, following[:, None])[:, 0]
        request.input_logprobs = [None, *chosen.tolist()]
        options = request.logprob_options
        if options.top:
            request.input_top = [None, *top(logprobs, options.top)]
        if options.token_ids:
            request.input_ids_logprobs = [None, *(at_ids(row, options.token_ids) for row in logprobs)]


def top(logprobs: Float[Tensor, "rows vocab"], count: int) -> list[Scored]:
    """Of each row the `count` largest, largest first. Which of equal ones come first is arbitrary; on CPU it depends on
    nothing but the row."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return list(map(Scored, values.cpu().numpy(), ids.cpu().numpy()))


def at_ids(logprobs: Float[Tensor, " vocab"], ids: tuple[int, ...]) -> Scored:
    return Scored(logprobs[list(ids)].cpu().numpy(), np.array(ids))
