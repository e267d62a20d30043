"""ReMax (arXiv 2310.10505): the reward of the greedy answer to the same prompt is the baseline."""

from meshy.algorithms.columns import column
from meshy.algorithms.groups import require_finite
from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput


def remax_advantage(inputs: AdvantageInputs, baseline: str = "greedy_reward") -> AdvantageOutput:
    """A_i = r_i - b_i, where b_i, the column named `baseline`, is the reward of a greedy answer. Groups do not matter.

    The reward is that of the whole sample, so that all its tokens have one advantage: the paper's return to go, where
    only the last token is rewarded.

    Metrics: `greedy_reward`, the mean of the baseline. Raises ValueError naming the sample if a reward or its baseline
    is NaN or infinite.
    """
    greedy = column(inputs.columns, baseline, "remax_advantage")
    require_finite(inputs.rewards, inputs.names, "reward")
    require_finite(greedy, inputs.names, baseline)
    advantages = inputs.rewards.double() - greedy.double()
    mean = float(greedy.double().mean()) if greedy.numel() else 0.0
    return AdvantageOutput(advantages=advantages.to(inputs.rewards.dtype), metrics={"greedy_reward": mean})
