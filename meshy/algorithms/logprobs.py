"""Log-probabilities and entropy from logits, a chunk of tokens at a time, so that no second [tokens, vocab] is kept."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26  # logits handled at once: 256 MiB of fp32


def token_logprobs(
    logits: Float[Tensor, "tokens vocab"], targets: Int[Tensor, " tokens"], temperature: float = 1.0
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """(log softmax(logits / temperature)[target], entropy of that distribution in nats), computed in at least fp32.

    The log-probs carry the gradient; the entropy is a measurement and carries none.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature)
    return logprobs, entropy


def entropy(logits: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """Shannon entropy of softmax(logits), nats: logsumexp(l) - sum p l. No gradient."""
    return torch.cat([_entropy(_wide(chunk))[1] for chunk in _chunks(logits.detach())])


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one number per token for backward, instead of a log-softmax of their size."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = [], [], []
        for chunk, target in zip(_chunks(logits), targets.split(_rows(logits)), strict=True):
            scaled = _wide(chunk) / temperature
            normaliser, entropy_ = _entropy(scaled)
            logprobs.append(scaled.gather(1, target[:, None]).squeeze(1) - normaliser)
            entropies.append(entropy_)
            normalisers.append(normaliser)
        ctx.save_for_backward(logits, targets, torch.cat(normalisers))
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_all := torch.cat(entropies))
        return torch.cat(logprobs), entropy_all

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        out = torch.empty_like(logits)
        rows = _rows(logits)
        parts = zip(
            _chunks(logits),
            targets.split(rows),
            normalisers.split(rows),
            grad.split(rows),
            out.split(rows),
            strict=True,
        )
        for chunk, target, normaliser, g, into in parts:
            probabilities = (_wide(chunk) / ctx.temperature - normaliser[:, None]).exp_()
            scaled = g / ctx.temperature
            result = probabilities.mul_(-scaled[:, None])
            result.scatter_add_(1, target[:, None], scaled[:, None])
            into.copy_(result)
        return out, None, None


def _entropy(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """(logsumexp, entropy) of each row."""
    normaliser = scaled.logsumexp(1)
    log_p = scaled - normaliser[:, None]
    p = log_p.exp()
    return normaliser, -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(1)


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.split(_rows(logits))


def _wide(chunk: Tensor) -> Tensor:
    return chunk if chunk.dtype == torch.float64 else chunk.float()
