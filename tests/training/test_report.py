import torch

from meshy.observe.metrics import STEP_FIELDS, TIME_PARTS
from meshy.queue.rows import Rows
from meshy.training.batch import Batch
from meshy.training.report import Times, step_row
from meshy.training.weights.publisher import Published

LEARNT = {
    "loss": -0.1,
    "grad_norm": 0.5,
    "entropy": 0.4,
    "lr": 1e-3,
    "mismatch_kl": 1e-9,
    "staleness_max": 0,
}


def row() -> dict:
    batch = Batch(
        rows=Rows("train", ("a", "b", "c", "d"), (0, 1, 2, 3), "trainer"),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        groups=torch.tensor([0, 0, 1, 1]),
        lengths=(5, 6, 7, 8),
        written=(2, 0, 4, 4),
        prompts=2,
        truncated=1,
        first_sent=100.5,
        last_generated=103.0,
        last_rewarded=103.5,
    )
    times = Times(
        started=100.0,
        taken=103.75,
        entered=104.0,
        trained=106.0,
        published=106.5,
        ended=107.0,
        waited=3.5,
        queue_work=0.25,
        rank_queue=0.25,
    )
    return step_row(3, 3, batch, LEARNT, Published("disk"), times)


def test_a_row_holds_everything_that_metrics_promise():
    assert {*STEP_FIELDS, *(f"time/{part}" for part in TIME_PARTS)} <= row().keys()


def test_its_numbers():
    said = row()
    assert (said["reward_mean"], said["reward_std"], said["response_length_mean"]) == (0.5, 0.5, 2.5)
    assert (said["samples"], said["tokens"], said["prompts"]) == (4, 26, 2)
    assert (said["truncated"], said["fully_masked"]) == (0.25, 1)
    assert (said["step_seconds"], said["tokens_per_second"]) == (7.0, 26 / 7)
    times = [said[f"time/{part}"] for part in ("generate", "reward", "queue", "token", "train", "publish", "wait")]
    assert times == [2.5, 0.5, 0.5, 0.25, 1.75, 1.0, 3.5]
