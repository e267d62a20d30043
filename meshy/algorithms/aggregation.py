"""From token losses to one number, with denominators of the whole mini-batch.

Because the denominators are global, the sum over micro-batches and ranks does not depend on how the mini-batch was cut.
"""

from jaxtyping import Float, Int
from torch import Tensor

from meshy.algorithms.interface import Aggregation, GlobalCounts
from meshy.algorithms.sequences import sequence_lengths


def aggregate(
    token_loss: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    counts: GlobalCounts,
    how: Aggregation = "token-mean",
    constant: float | None = None,
) -> Float[Tensor, ""]:
    """This micro-batch's share of the loss.

    token-mean: sum / global tokens (arXiv 2503.14476). seq-mean-token-sum: sum / global sequences.
    seq-mean-token-mean: mean over each sequence's tokens, summed / global sequences (arXiv 2402.03300).
    seq-mean-token-sum-norm: sum / `constant` (arXiv 2503.20783).
    Without tokens the result is 0 and still has a (zero) gradient.
    """
    match how:
        case "token-mean":
            return token_loss.sum() / max(counts.tokens, 1)
        case "seq-mean-token-sum":
            return token_loss.sum() / max(counts.sequences, 1)
        case "seq-mean-token-mean":
            lengths = sequence_lengths(sequence).to(token_loss.dtype)
            return (token_loss / lengths[sequence]).sum() / max(counts.sequences, 1)
        case "seq-mean-token-sum-norm":
            if not constant or constant <= 0:
                raise ValueError(f"seq-mean-token-sum-norm needs a positive constant to divide by, got {constant}")
            return token_loss.sum() / constant
    raise ValueError(f"unknown aggregation {how!r}; choose one of {', '.join(Aggregation.__args__)}")
