"""KL to a reference policy as a term of the loss (GRPO, arXiv 2402.03300)."""

import torch

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.columns import column
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import OptionError, options_of

KINDS = ("k2", "k3", "low_var", "k3_k2_gradient")


def kl_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """An estimate of KL(policy || reference) from the sampled tokens, which are taken to be the policy's own.

    Options: reference ("ref_logprobs"), the column of the reference's log-probs; kind ("k3"): "k2", whose gradient is
    on average that of the KL; "k3", as in GRPO; "low_var", k3 bounded; or "k3_k2_gradient", k3 by value with the
    gradient of k2 (see algorithms.kl). "k1" is refused.

    Tokens that no reference scored (NaN) add nothing; the denominators remain those of all tokens.

    Metrics (token sums): `ref_kl`, by this estimate, nats.
    """
    options = options_of(config, "kl_loss", reference="ref_logprobs", kind="k3")
    kind = options["kind"]
    if kind == "k1":
        raise OptionError(
            "kind",
            "kl_loss: k1 has gradient 1 at every token whatever the reference says, so it holds the policy to nothing; "
            "choose k2, k3, low_var or k3_k2_gradient, or put k1 into the reward (algorithms.kl_reward)",
        )
    if kind not in KINDS:
        raise OptionError("kind", f"kl_loss has no kind {kind!r}; choose one of {', '.join(KINDS)}")
    reference = column(inputs.columns, options["reference"], "kl_loss")
    # Where the reference is the policy itself, value and gradient of every estimate are exactly 0.
    reference = torch.where(reference.isnan(), inputs.logprobs.detach(), reference)
    kl = kl_estimate(inputs.logprobs, reference, kind)
    loss = aggregate(kl, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    return LossOutput(loss=loss, metrics={"ref_kl": kl.detach().sum()})
