"""The engine on real processes over gloo: parity with transformers, gradients that depend on the data alone."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.data import make_samples

pytestmark = pytest.mark.e2e

REFERENCE = "padded 10000"


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all parameters together."""
    assert a.keys() == b.keys()
    difference = math.sqrt(sum(float((a[k].double() - b[k].double()).square().sum()) for k in b))
    return difference / math.sqrt(sum(float(b[k].double().square().sum()) for k in b))


@pytest.mark.parametrize("layout", ["padded", "packed", "packed with padding"])
@pytest.mark.parametrize("model", ["qwen3_tied", "qwen3", "qwen2_tied", "qwen2"])
def test_logits_equal_transformers(computed, models, model, layout):
    reference = AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for sample in make_samples().values():
            logits = reference(sample.tokens[None]).logits[0]
            expected.append(logits[:-1][sample.loss_mask[1:]])
    torch.testing.assert_close(computed[1]["logits"][model][layout], torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["qwen3_tied", "qwen3", "qwen2_tied", "qwen2"])
def test_an_export_is_the_model_itself(computed, models, model):
    before = AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32).state_dict()
    after, told = AutoModelForCausalLM.from_pretrained(
        models / "export" / model, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(computed, world):
    results = computed[world]["gradients"]
    reference = computed[1]["gradients"][REFERENCE]
    cuts = {name: results[name]["micro_batches"] for name in results if name.startswith(("padded", "packed"))}
    assert len(set(cuts.values())) >= 3  # the budgets do cut differently
    for name in cuts:
        assert relative(results[name]["gradient"], reference["gradient"]) < 1e-6, name
        for key, value in reference["sums"].items():
            assert results[name]["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)


@pytest.mark.parametrize("how", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_same_for_other_aggregations(computed, how):
    reference = computed[1]["gradients"][f"{how} 10000"]
    for world in (1, 2):
        for budget in (1, 10000):
            result = computed[world]["gradients"][f"{how} {budget}"]
            assert relative(result["gradient"], reference["gradient"]) < 1e-6, (world, budget)
    other = computed[1]["gradients"][REFERENCE]["gradient"]
    assert relative(reference["gradient"], other) > 1e-2  # another loss it is


@pytest.mark.parametrize("world", [1, 2])
def test_activation_checkpointing_changes_nothing(computed, world):
    reference = computed[1]["gradients"][REFERENCE]
    for name in ("full", "selective"):
        result = computed[world]["gradients"][f"checkpointing {name}"]
        assert relative(result["gradient"], reference["gradient"]) < 1e-6


@pytest.mark.parametrize("world", [1, 2])
def test_lower_precision_stays_close_and_keeps_float32_gradients(computed, world):
    reference = computed[1]["gradients"][REFERENCE]["gradient"]
    for name in ("bf16", "bf16 file"):  # computing in bf16; a model stored in bf16, trained in fp32
        gradient = computed[world]["gradients"][name]["gradient"]
        assert {g.dtype for g in gradient.values()} == {torch.float32}
        assert 1e-5 < relative(gradient, reference) < 0.1, name


@pytest.mark.parametrize("old", ["rollout", "recompute", "loglinear"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_correction_does_not_depend_on_how_the_batch_is_cut(computed, world, old):
    reference = computed[1]["corrected"][f"{old} 10000"]
    for how in ("1", "60", "10000", "packed"):
        result = computed[world]["corrected"][f"{old} {how}"]
        assert relative(result["gradient"], reference["gradient"]) < 1e-6, how
        assert result["sums"].keys() == reference["sums"].keys()
        for key, value in reference["sums"].items():
            assert result["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), (how, key)
    rules = [value for name, value in reference["sums"].items() if name.startswith("correction/")]
    assert min(rules) > 0, reference["sums"]  # each binds, and not for all tokens
    plain = computed[1]["gradients"][REFERENCE]["gradient"]
    assert relative(reference["gradient"], plain) > 1e-2  # it does correct


@pytest.mark.parametrize("old", ["rollout", "recompute", "loglinear"])
@pytest.mark.parametrize("world", [1, 2])
def test_corrected_samples_without_advantage_need_no_backward_either(computed, world, old):
    whole = computed[1]["corrected"][f"{old} without advantage"]
    scored = computed[world]["corrected"][f"{old} only scored"]
    assert scored["micro_batches"] < whole["micro_batches"]
    assert relative(scored["gradient"], whole["gradient"]) < 1e-6
    for name, value in whole["sums"].items():
        assert scored["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_log_linear_old_logprobs_of_tokens_on_policy_are_the_rollouts(computed):
    on_policy, plain = computed[1]["corrected"]["loglinear on policy"], computed[1]["gradients"][REFERENCE]
    assert on_policy["sums"]["ppo_kl"] == pytest.approx(plain["sums"]["ppo_kl"])
    assert relative(on_policy["gradient"], plain["gradient"]) < 1e-6


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_dropped_whole_gives_zero_loss_and_zero_gradient(computed, world):
    result = computed[world]["corrected"]["all dropped"]
    assert result["sums"]["loss"] == result["sums"]["correction/weight"] == 0
    assert all((gradient == 0).all() for gradient in result["gradient"].values())


@pytest.mark.parametrize("which", ["some", "all"])
@pytest.mark.parametrize("world", [1, 2])
def test_samples_without_advantage_need_no_backward(computed, world, which):
    whole = computed[1]["gradients"][f"{which} without advantage"]
    scored = computed[world]["gradients"][f"{which} only scored"]
    assert scored["micro_batches"] < whole["micro_batches"]
    for name, value in whole["sums"].items():
        assert scored["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    if which == "some":
        assert relative(scored["gradient"], whole["gradient"]) < 1e-6
    else:
        assert all((gradient == 0).all() for gradient in scored["gradient"].values())


@pytest.mark.parametrize("world", [1, 2])
def test_samples_without_advantage_may_rest_while_others_stand_for_them(computed, world):
    found = computed[world]["gradients"]
    whole, resting = computed[1]["gradients"]["some without advantage"], found["some resting"]
    assert resting["sums"]["loss"] == pytest.approx(whole["sums"]["loss"], rel=1e-5)
    assert relative(resting["gradient"], whole["gradient"]) < 1e-6
    assert found["weight"] > 1.2
    trained, scored = found["trained alone"]["sums"], found["scored alone"]["sums"]
    for name in ("entropy", "mismatch_kl", "logprob_diff_mean", "ess/weight"):
        together = trained[name] + found["weight"] * scored[name]
        assert resting["sums"][name] == pytest.approx(together, rel=1e-5), name
        assert together != pytest.approx(whole["sums"][name], rel=1e-5)  # an estimate


@pytest.mark.parametrize("world", [1, 2])
def test_a_fully_masked_batch_gives_zero_loss_and_zero_gradient(computed, world):
    result = computed[world]["gradients"]["all masked"]
    assert result["sums"]["loss"] == 0.0
    assert all((gradient == 0).all() for gradient in result["gradient"].values())


def test_a_rank_without_a_sample_keeps_in_step(computed):
    one, two = (computed[world]["gradients"]["one sample"] for world in (1, 2))
    assert one["sums"]["loss"] != 0
    assert relative(two["gradient"], one["gradient"]) < 1e-6


def test_training_with_mini_batches_and_epochs_is_the_same_on_two_ranks(computed):
    one, two = (computed[world]["training"] for world in (1, 2))
    for a, b in zip(one["reports"], two["reports"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name
    assert relative(one["weights"], two["weights"]) < 1e-5


def test_recomputed_old_logprobs_make_the_first_step_on_policy(computed):
    first = computed[1]["training"]["reports"][0]
    assert first["mismatch_kl"] > 0.01  # the rollout log-probs of these samples are made up
    assert first["ppo_kl"] < first["mismatch_kl"] / 2  # but the ratio is taken against the trainer's own


def test_a_correction_is_reported_with_each_step(computed):
    for report in computed[1]["training"]["reports"]:
        assert 0 < report["ess"] < 1 and 0.5 < report["correction/ess"] < 1  # truncation evens the weights out
        assert report["ess"] < report["correction/ess"]
        assert 0.5 < report["correction/weight_mean"] < 1.2
        assert report["correction/dropped"] == 0 < report["correction/truncated"] < 1
