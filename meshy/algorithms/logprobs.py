"""What losses take from logits, a chunk of tokens at a time, so that no second [tokens, vocab] is kept beside them."""

from collections.abc import Callable

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
    _require_positive(temperature)
    logprobs, entropy = _Logprobs.apply(logits, targets[:, None], temperature, True)
    return logprobs.squeeze(1), entropy


def candidate_logprobs(
    logits: Float[Tensor, "tokens vocab"], ids: Int[Tensor, "tokens candidates"], temperature: float = 1.0
) -> Float[Tensor, "tokens candidates"]:
    """log softmax(logits / temperature) at several ids of each token, computed in at least fp32; carries the gradient.

    Without a token, `ids` may have any width.
    """
    _require_positive(temperature)
    return _Logprobs.apply(logits, ids.long(), temperature, False)[0]


def entropy(logits: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """Shannon entropy of softmax(logits), nats: logsumexp(l) - sum p l. No gradient."""
    return torch.cat([_entropy(scaled := wide(chunk), scaled.logsumexp(1)) for chunk in _chunks(logits.detach())])


def in_chunks(
    function: Callable[..., Float[Tensor, " rows"]], logits: Float[Tensor, "tokens vocab"], *others: Tensor
) -> Float[Tensor, " tokens"]:
    """function(logits, *others), which must treat each row by itself, computed a few rows at a time.

    Only the inputs are kept for backward, which computes each chunk again. `others`, with one entry or row a token,
    have no gradient.
    """
    return _InChunks.apply(function, logits, *others)


def wide(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In the precision to compute in: float64 stays, anything else becomes float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


class _Logprobs(torch.autograd.Function):
    """Keeps the logits and one number per token for backward, instead of a log-softmax of their size."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies, normalisers = [], [], []
        for chunk, chosen in zip(_chunks(logits), ids.split(_rows(logits)), strict=True):
            scaled = wide(chunk) / temperature
            normaliser = scaled.logsumexp(1)
            logprobs.append(scaled.gather(1, chosen) - normaliser[:, None])
            normalisers.append(normaliser)
            if with_entropy:
                entropies.append(_entropy(scaled, normaliser))
        ctx.save_for_backward(logits, ids, torch.cat(normalisers))
        ctx.temperature = temperature
        if not with_entropy:
            return torch.cat(logprobs), None
        ctx.mark_non_differentiable(entropy_all := torch.cat(entropies))
        return torch.cat(logprobs), entropy_all

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, ids, normalisers = ctx.saved_tensors
        out = torch.empty_like(logits)
        rows = _rows(logits)
        parts = zip(
            _chunks(logits), ids.split(rows), normalisers.split(rows), grad.split(rows), out.split(rows), strict=True
        )
        for chunk, chosen, normaliser, g, into in parts:
            probabilities = (wide(chunk) / ctx.temperature - normaliser[:, None]).exp_()
            scaled = g / ctx.temperature
            result = probabilities.mul_(-scaled.sum(1, keepdim=True))
            result.scatter_add_(1, chosen, scaled)
            into.copy_(result)
        return out, None, None, None


class _InChunks(torch.autograd.Function):
    """Smaller chunks than elsewhere: the graph of one holds several tensors of its size."""

    @staticmethod
    def forward(ctx, function: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(logits, *others)
        ctx.function, ctx.rows = function, max(1, _rows(logits) // 8)
        parts = zip(*(tensor.split(ctx.rows) for tensor in (logits, *others)), strict=True)
        return torch.cat([function(*part) for part in parts])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, *others = ctx.saved_tensors
        out = torch.empty_like(logits)
        parts = zip(*(tensor.split(ctx.rows) for tensor in (grad, out, logits, *others)), strict=True)
        for g, into, chunk, *rest in parts:
            with torch.enable_grad():
                values = ctx.function(leaf := chunk.detach().requires_grad_(), *rest)
            into.copy_(torch.autograd.grad(values, leaf, g)[0])
        return None, out, *(None for _ in others)


def _entropy(scaled: Tensor, normaliser: Tensor) -> Tensor:
    log_p = scaled - normaliser[:, None]
    p = log_p.exp()
    return -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(1)


def _require_positive(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.split(_rows(logits))
