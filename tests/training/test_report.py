import torch

from meshy.observe.metrics import STEP_FIELDS, TIME_PARTS
from meshy.queue.rows import Rows
from meshy.training.batch import Batch, batch_of
from meshy.training.report import Times, ages_row, parts_together, step_row
from meshy.training.weights.publisher import Published
from tests.training.arrivals import group_columns, groups

LEARNT = {
    "loss": -0.1,
    "grad_norm": 0.5,
    "entropy": 0.4,
    "lr": 1e-3,
    "mismatch_kl": 1e-9,
    "staleness_max": 0,
}


def row(parts: dict[str, torch.Tensor] | None = None) -> dict:
    batch = Batch(
        rows=Rows("train", ("a", "b", "c", "d"), (0, 1, 2, 3), "trainer"),
        reward_parts={"reward": torch.tensor([1.0, 0.0, 0.0, 1.0])} if parts is None else parts,
        groups=torch.tensor([0, 0, 1, 1]),
        columns={},
        lengths=(5, 6, 7, 8),
        written=(2, 0, 4, 4),
        ranks=(0, 0, 0, 0),
        prompts=2,
        truncated=1,
        lost=3,
        first_sent=100.5,
        last_generated=103.0,
        last_rewarded=103.5,
    )
    times = Times(started=100.0)
    times.taken(batch, waited=3.5, now=103.75)
    times.learnt(asked=103.75, entered=104.0, now=106.0, rank_queue=0.25)
    times.ended = 107.0
    return step_row(3, batch, LEARNT, Published("disk"), times)


def test_parts_of_a_reward_are_told_apart_where_there_are_several():
    told = row({"reward": torch.tensor([1.0, 0.0, 1.0, 1.0]), "length": torch.tensor([0.0, 0.0, -1.0, 0.0])})
    assert told["reward/reward"] == 0.75 and told["reward/length"] == -0.25
    assert not any(name.startswith("reward/") for name in row())


def test_a_row_holds_everything_that_metrics_promise():
    assert {*STEP_FIELDS, *(f"time/{part}" for part in TIME_PARTS)} <= row().keys()


def test_its_numbers():
    said = row()
    assert (said["reward_mean"], said["reward_std"], said["response_length_mean"]) == (0.5, 0.5, 2.5)
    assert (said["samples"], said["tokens"], said["prompts"]) == (4, 26, 2)
    assert (said["truncated"], said["fully_masked"], said["lost"]) == (0.25, 1, 3)
    assert (said["step_seconds"], said["tokens_per_second"]) == (7.0, 26 / 7)
    times = [said[f"time/{part}"] for part in ("generate", "reward", "queue", "token", "train", "publish", "wait")]
    assert times == [2.5, 0.5, 0.5, 0.25, 1.75, 1.0, 3.5]


def test_times_of_the_parts_of_a_batch_add_up():
    times = Times(started=100.0)
    for part, (asked, entered, now) in enumerate(((104.0, 104.5, 106.0), (107.0, 107.0, 110.0))):
        batch = batch_of(groups(group_columns(part, t_rewarded=asked - 0.25)))
        times.taken(batch, waited=1.0, now=asked)
        times.learnt(asked, entered, now, rank_queue=0.125)
    assert (times.waiting, times.queue, times.token, times.training) == (2.0, 0.75, 0.5, 4.25)
    assert times.trained == 110.0


def test_the_queue_is_not_blamed_for_rows_that_were_there_before_they_were_asked_for():
    times = Times(started=100.0)
    times.taken(batch_of(groups(group_columns(0, t_rewarded=50.0))), waited=0.25, now=200.0)
    assert (times.waiting, times.queue) == (0.25, 0.25)


def test_ages_are_counted_in_tokens():
    assert ages_row([1.0, 0.0, 3.0]) == {
        "staleness_mean": 1.5, "staleness_max": 2, "staleness/0": 0.25, "staleness/2": 0.75,
    }  # fmt: skip
    assert ages_row([4.0, 0.0]) == {"staleness_mean": 0.0, "staleness_max": 0, "staleness/0": 1.0}
    assert ages_row([]) == ages_row([0.0, 0.0]) == {"staleness_mean": 0.0, "staleness_max": 0}


def test_parts_report_means_sums_and_what_only_the_first_can_know():
    first = {"loss": 1.0, "mismatch_kl": 0.0, "groups": 3, "lr": 2.0, "ages": [2.0]}
    second = {"loss": 2.0, "mismatch_kl": 0.5, "groups": 4, "lr": 1.0, "ages": [1.0, 0.0, 1.0]}
    assert parts_together([first, second]) == {
        "loss": 1.5, "mismatch_kl": 0.0, "groups": 7, "lr": 1.0,
        "staleness_mean": 0.5, "staleness_max": 2, "staleness/0": 0.75, "staleness/2": 0.25,
    }  # fmt: skip
    assert parts_together([first])["loss"] == 1.0
