"""From a part of the logits to the log-probs that are asked for; the logits themselves are not kept. Pure."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.scoring.config import Score
from meshy.titan.policy_model import Reduce

IMPOSSIBLE = -50.0
"""Log-prob, in nats, of a token that the model does not have: as good as none, and finite."""


def likelihoods(
    scores: Sequence[Score],
    *,
    targets: Int[Tensor, " tokens"],
    candidates: Int[Tensor, "tokens K"] | None,
    k: int,
    temperature: float,
    vocab: int | None = None,
    token_map: Int[Tensor, " vocab"] | None = None,
) -> Reduce:
    """What keeps, for rows [start, stop) of logits, log softmax(logits / temperature), in float32, of what `scores`
    names, in that order (see `TeacherConfig`). Ids are those of the policy's tokenizer throughout. vocab: how many ids
    the policy has; what this model has beyond them is left out. token_map: instead, the model's own id of each, -1 for
    none."""

    def reduce(logits: Float[Tensor, "part vocab"], start: int, stop: int) -> tuple[Tensor, ...]:
        if token_map is None:
            logits = logits[:, :vocab]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=1)
        if token_map is not None:
            logprobs = torch.where(token_map >= 0, logprobs[:, token_map.clamp(min=0)], IMPOSSIBLE)
        kept: list[Tensor] = []
        for score in scores:
            match score:
                case "sampled":
                    kept.append(logprobs.gather(1, targets[start:stop, None]).squeeze(1))
                case "candidates":
                    assert candidates is not None
                    kept.append(logprobs.gather(1, candidates[start:stop]))
                case "topk":
                    values, ids = logprobs.topk(k)
                    kept += [ids.int(), values]
                case "vocabulary":
                    kept.append(logprobs)
        return tuple(kept)

    return reduce
