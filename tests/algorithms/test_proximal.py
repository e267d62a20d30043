import torch

from meshy.algorithms.proximal import loglinear_proximal, proximal_share
from tests.algorithms.golden_cases import close


def test_share_of_the_way_by_versions():
    behaviour, proximal = torch.tensor([7, 6, 5, 3], dtype=torch.int32), 7
    share = proximal_share(proximal - behaviour)
    trained = proximal + 1
    close(share, ((proximal - behaviour) / (trained - behaviour)).double())
    close(share[:3], [0, 1 / 2, 2 / 3])


def test_on_policy_tokens_keep_the_log_prob_they_were_sampled_with():
    rollout = torch.tensor([-1.0, -1.0, -3.0])
    current = torch.tensor([-2.0, -2.0, -1.0], requires_grad=True)
    proximal = loglinear_proximal(rollout, current, proximal_share(torch.tensor([0, 1, 3])))
    close(proximal, [-1.0, -1.5, -1.5])
    assert not proximal.requires_grad
