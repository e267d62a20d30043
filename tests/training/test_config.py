import dataclasses
import re

import pytest

from meshy.algorithms.correction import Correction
from meshy.contract import derive_contract
from meshy.inference.config import InferenceConfig
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceGroup
from meshy.refusals import type_faults
from meshy.rollout.config import RolloutConfig
from meshy.settings import apply_settings
from meshy.training.config import TrainerConfig


def recipe(
    sampling: Sampling | None = None,
    replicas: int = 1,
    inference: InferenceConfig | None = None,
    deterministic: bool = False,
    **options,
) -> Recipe:
    return Recipe(
        name="test",
        model="model",
        data="meshy.data.addition:addition",
        sampling=sampling or Sampling(),
        deterministic=deterministic,
        groups=(
            ServiceGroup(id="inference", config=inference or InferenceConfig(), gpus_per_replica=1),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(**{"batch_size": 8, **options}),
                gpus_per_replica=1,
                replicas=replicas,
            ),
            ServiceGroup(id="rollout", config=RolloutConfig(group_size=4)),
        ),
    )


def faults(recipe: Recipe) -> list[str]:
    group = recipe.group("trainer")
    return group.config.faults(recipe)


def test_a_plain_recipe_has_no_fault():
    assert derive_contract(recipe().declarations())[1] == []
    assert faults(recipe()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"mini_batches": 9}, "mini_batches: expected at most batch_size"),
        ({"tokens_per_micro_batch": 1000}, r"tokens_per_micro_batch: expected at least .*\(1024\)"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "aggregation_constant: expected a positive number"),
        ({"dual_clip": 0.5}, "dual_clip: expected more than 1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"write_every": 0}, "write_every: expected at least 1"),
        ({"bucket_mb": 0}, "bucket_mb: expected at least 1"),
        ({"publish_to": ("inferense",)}, "publish_to: no group 'inferense' serves a model.*inference"),
        ({"sampling": Sampling(top_p=0.9)}, "sampling: rows sampled with top_p"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature: expected more than 0"),
        ({"weights_deadline": 600.0}, r"weights_deadline: expected less than collective_timeout \(600"),
        ({"replicas": 2}, "replicas: expected 1 trainer"),
        ({"publish_in_flight": "keep"}, "publish_in_flight: 'keep' is for .* with a window of 1 there are none"),
        ({"correction": Correction(veto=2.0)}, "correction.veto: expected more than 0 and less than 1"),
        (
            {"correction": Correction(importance="token")},
            "correction.importance: expected none with old_logprobs=rollout",
        ),
    ],
)
def test_faults_say_what_to_change(options, message):
    (found,) = faults(recipe(**options))
    assert re.search(message, found)


STREAMED = {"batch_size": 16, "mini_batches": 2, "stream_minibatch": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2}, "stream_minibatch: its mini-batches are trained once, as they come, not 2 times"),
        ({"deterministic": True}, "stream_minibatch: .* a run does not repeat itself.*deterministic=false"),
        (
            {"mini_batches": 8},
            "mini_batches: 16 samples streamed in 8 parts do not divide into groups of 4; set it to a divisor of 4",
        ),
        ({"mini_batches": 3}, "do not divide into groups of 4"),
        ({"mini_batches": 0}, "mini_batches: expected at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness: expected 0 or more, got -1"),
    ],
)
def test_what_cannot_be_streamed_is_refused(options, message):
    (found,) = faults(recipe(**STREAMED | options))
    assert re.search(message, found)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_whole_groups_can_be_streamed(parts):
    wanted = recipe(**STREAMED | {"mini_batches": parts, "max_staleness": 0})
    assert faults(wanted) == []
    assert wanted.group("trainer").config.part_sizes == (16 // parts,) * parts


def test_a_batch_that_is_not_streamed_is_waited_for_whole():
    wanted = recipe(**STREAMED | {"mini_batches": 8, "stream_minibatch": False, "epochs": 3})
    assert faults(wanted) == []
    assert wanted.group("trainer").config.part_sizes == (16,)


def test_a_correction_is_set_by_dotted_paths():
    settings = {
        "trainer.old_logprobs": "loglinear",
        "trainer.correction.importance": "token",
        "trainer.correction.action": "mask",
        "trainer.correction.high": "5",
        "trainer.correction.veto": "1e-4",
        "trainer.correction.opsm": "none",
    }
    wanted, unset = apply_settings(recipe(), settings)
    assert unset == [] and faults(wanted) == [] and type_faults(wanted) == []
    expected = Correction(importance="token", action="mask", high=5, veto=1e-4)
    assert wanted.group("trainer").config.correction == expected
    _, (fault,) = apply_settings(recipe(), {"trainer.correction.reject": "seq_mean_k4"})
    assert "expected 'token_k1' | 'token_k2'" in fault
    _, (fault,) = apply_settings(recipe(), {"trainer.correction.importence": "token"})
    assert "importance" in fault


def test_in_a_ring_no_rank_waits_for_a_publish():
    plain = recipe(weights_deadline=600.0)
    members = (("inference", FALLBACK), ("trainer", ON_DEMAND))
    assert faults(dataclasses.replace(plain, rings=(ColocationRing(id="ring", members=members),))) == []


def test_filtered_sampling_may_be_meant():
    assert faults(recipe(sampling=Sampling(top_k=5), allow_filtered_sampling=True)) == []


def test_a_column_of_ones_own_is_waited_for():
    wanted = recipe(also_consumes=("bonus",))
    config = wanted.group("trainer").config
    (train,) = (c for c in config.consumes(wanted) if c.partition == "train")
    assert "bonus" in train.names
    assert any("bonus" in fault for fault in derive_contract(wanted.declarations())[1])  # nobody produces it
    assert dataclasses.replace(config, also_consumes=()).consumes(wanted) != config.consumes(wanted)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"dp": 2}])
@pytest.mark.parametrize("publish", ["shm", "collective", "disk", "auto"])
def test_a_way_that_weights_cannot_go_is_refused_before_the_run(publish, options):
    wanted = recipe(publish=publish)
    serving = dataclasses.replace(wanted.groups[0], config=InferenceConfig(**options))
    wanted = dataclasses.replace(wanted, groups=(serving, *wanted.groups[1:]))
    found = [fault for fault in faults(wanted) if fault.startswith("publish:")]
    assert len(found) == (publish in ("shm", "collective"))


@pytest.mark.parametrize("member", ["inference", "trainer"])
def test_weights_do_not_go_into_a_ring_or_out_of_it(member):
    ring = ColocationRing(id="r", members=((member, FALLBACK), ("teacher", ON_DEMAND)))
    (found,) = faults(dataclasses.replace(recipe(publish="disk"), rings=(ring,)))
    assert "publish_to: 'inference' is in ring" in found and "put both into one ring, or neither" in found


@pytest.mark.parametrize(
    ("wanted", "served", "dtype"),
    [("auto", "auto", "auto"), ("auto", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32")],
)
def test_weights_are_published_in_what_inference_is_told_to_compute_in(wanted, served, dtype):
    told = recipe(publish_dtype=wanted, inference=InferenceConfig(dtype=served))
    assert told.group("trainer").config.dtype_served(told) == dtype
