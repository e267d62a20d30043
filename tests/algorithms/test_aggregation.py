import pytest
import torch

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import GlobalCounts
from tests.algorithms.golden_cases import case, close, f64

HOW = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def flat(batch):
    loss, mask = f64(batch["loss"]), f64(batch["mask"]).bool()
    return loss[mask], torch.arange(mask.shape[0])[:, None].expand_as(mask)[mask], mask


def counts(*masks):
    return GlobalCounts(tokens=sum(int(m.sum()) for m in masks), sequences=sum(int(m.any(1).sum()) for m in masks))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["with_empty_row", "all_masked"])
def test_golden(name, how):
    c = case("loss_agg", name)
    loss, sequence, mask = flat(c["input"])
    close(aggregate(loss, sequence, counts(mask), how, constant=mask.shape[1]), c["expect"][how])


@pytest.mark.parametrize("how", HOW[:3])
def test_splitting_into_micro_batches_changes_nothing(how):
    c = case("loss_agg", "micro_batch_split_invariance")
    parts = [flat(b) for b in c["input"]["micro_batches"]]
    whole = counts(*[mask for _, _, mask in parts])
    assert (whole.tokens, whole.sequences) == (c["input"]["global_tokens"], c["input"]["global_seqs"])
    close(sum(aggregate(loss, sequence, whole, how) for loss, sequence, _ in parts), c["expect"][how])


def test_a_mean_of_each_micro_batch_would_be_wrong():
    c = case("loss_agg", "wrong_per_micro_batch_mean")
    parts = [flat(b) for b in c["input"]["micro_batches"]]
    whole = counts(*[mask for _, _, mask in parts])
    right = sum(aggregate(loss, sequence, whole, "token-mean") for loss, sequence, _ in parts)
    assert right != c["expect"]["must_not_equal_token_mean"]


def test_a_one_token_answer_has_a_loss():
    one = GlobalCounts(tokens=1, sequences=1)
    for how in HOW:
        assert aggregate(torch.tensor([2.0]), torch.tensor([0]), one, how, constant=1.0) == 2.0


def test_bad_settings_are_refused():
    one = GlobalCounts(tokens=1, sequences=1)
    with pytest.raises(ValueError, match="positive constant"):
        aggregate(torch.ones(1), torch.tensor([0]), one, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-sum"):
        aggregate(torch.ones(1), torch.tensor([0]), one, "mean")  # type: ignore[arg-type]
