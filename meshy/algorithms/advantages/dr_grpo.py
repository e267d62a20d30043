"""Dr. GRPO (arXiv 2503.20783): the reward less the mean of its group, A_i = r_i - mean_g."""

from meshy.algorithms.groups import group_statistics
from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput


def dr_grpo_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - mean_g, which unlike GRPO's does not weigh questions by how much their answers vary. The paper's loss
    goes with it: aggregation `seq-mean-token-sum-norm`, so that long answers count no less a token.

    A group of one has no baseline: its advantage is 0. A group whose rewards are all equal, up to float noise, gets
    exactly 0. Metrics and errors are those of GRPO.
    """
    groups = group_statistics(inputs)
    return AdvantageOutput(advantages=groups.deviation.to(inputs.rewards.dtype), metrics=groups.metrics)
