"""The reward workers, with real processes."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshy.rewards import RewardSample
from meshy.rewards.pool import ConstantRewardWatch, RewardError, RewardPool

REWARDS = Path(__file__).parent / "field_rewards.py"
BY_ANSWER = f"{REWARDS}:by_answer"


def sample(answer, **info) -> RewardSample:
    return RewardSample(prompt=({"role": "user", "content": "2+2"},), response="four", answer=answer, info=info)


def run(answers, *, reward=BY_ANSWER, workers=2, deadline=30.0, **info):
    async def main():
        async with RewardPool(reward, workers=workers, deadline=deadline) as pool:
            return await pool.score([sample(answer, **info) for answer in answers])

    return asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, perhaps while it was read
        return False


async def gone(pids, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_what_is_a_number_converts():
    results = run(["true", "text", "numpy", "numpy 0-d", "fraction", "int"])
    assert [(result.value, result.error) for result in results] == [(1.0, None)] * 6
    assert all(type(result.value) is float for result in results)


def test_what_is_no_number_is_an_error_that_names_reward_and_sample():
    answers = ["none", "nan", "inf", "text nan", "word", "dict", "list", "array", "complex", "raise", "exit"]
    for answer, result in zip(answers, run(answers), strict=True):
        assert result.value is None and not result.timed_out, answer
        assert BY_ANSWER in result.error and f"answer '{answer}'" in result.error and "'four'" in result.error
    assert "KeyError: 'no such verdict'" in run(["raise"])[0].error


def test_a_hung_sample_is_killed_and_the_others_are_kept(tmp_path):
    async def main():
        async with RewardPool(BY_ANSWER, workers=2, deadline=2.0) as pool:
            pids = set()
            for hang in ("loop", "sleep", "power"):
                results = await pool.score([sample(a) for a in [*["true"] * 4, hang, *["true"] * 3]])
                assert [result.value for result in results] == [1.0] * 4 + [None] + [1.0] * 3
                assert [result.timed_out for result in results] == [False] * 4 + [True] + [False] * 3
                assert "within 2 s" in results[4].error
                folder = tmp_path / hang
                folder.mkdir()
                meeting = await pool.score([sample("meet", folder=str(folder), guests=2)] * 2)
                assert [result.value for result in meeting] == [1.0] * 2  # both workers are there again
                pids |= {int(name) for name in os.listdir(folder)}
        assert len(pids) >= 4 and await gone(pids)

    asyncio.run(main())


def test_slow_rewards_run_side_by_side_off_the_event_loop(tmp_path):
    async def main():
        async def generation():
            while len(os.listdir(tmp_path)) < 8:
                await asyncio.sleep(0.01)
            (tmp_path / "end").touch()

        async with RewardPool(BY_ANSWER, workers=8, deadline=60) as pool:
            # each reward waits for the seven others, and for the event loop to go on meanwhile
            samples = [sample("meet", folder=str(tmp_path), guests=9)] * 8
            results, _ = await asyncio.gather(pool.score(samples), generation())
        return results

    assert [result.value for result in asyncio.run(main())] == [1.0] * 8


def test_a_worker_that_dies_is_replaced_and_its_sample_reported():
    results = run(["true", "die", "true", "true"], workers=1)
    assert [result.value for result in results] == [1.0, None, 1.0, 1.0]
    assert "exit status 3" in results[1].error and not results[1].timed_out


def test_a_kill_takes_the_rewards_own_children_along(tmp_path):
    file = tmp_path / "pid"

    async def main():
        async with RewardPool(BY_ANSWER, workers=1, deadline=1.0) as pool:
            (result,) = await pool.score([sample("child", file=str(file))])
            assert result.timed_out
            assert await gone([int(file.read_text())])

    asyncio.run(main())


def test_workers_die_with_their_parent():
    code = f"""
import asyncio
from meshy.rewards import RewardSample
from meshy.rewards.pool import RewardPool
async def main():
    async with RewardPool({BY_ANSWER!r}, workers=2) as pool:
        results = await pool.score([RewardSample(prompt=(), response="", answer="pid")] * 8)
        print(*(int(result.value) for result in results), flush=True)
        await pool.score([RewardSample(prompt=(), response="", answer="loop")] * 2)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = {int(pid) for pid in parent.stdout.readline().split()}
        assert pids and all(alive(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    assert asyncio.run(gone(pids))


def test_a_cancelled_score_frees_its_worker():
    async def main():
        async with RewardPool(BY_ANSWER, workers=1, deadline=60) as pool:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.score([sample("sleep")]), 0.3)
            (result,) = await asyncio.wait_for(pool.score([sample("true")]), 30)
            return result.value

    assert asyncio.run(main()) == 1.0


def test_a_reward_that_cannot_be_loaded_says_why(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nraise RuntimeError('the judge has no key')\n")
    with pytest.raises(RewardError, match=r"(?s)broken.py:reward.*the judge has no key"):
        run(["true"], reward=f"{broken}:reward")
    with pytest.raises(RewardError, match="by_answr"):
        run(["true"], reward=f"{REWARDS}:by_answr")


def test_a_function_is_given_by_its_import_path_and_a_lambda_refused():
    from meshy.rewards.addition import reward

    pool = RewardPool(reward)
    assert pool.reward == "meshy.rewards.addition:reward"
    with pytest.raises(ValueError, match="top level"):
        RewardPool(lambda sample: 1.0)


def test_workers_start_without_torch():
    assert run(["true"], reward=f"{REWARDS}:torch_free", workers=1)[0].value == 1.0


def test_a_sample_that_does_not_pickle_is_reported():
    results = run([lambda: 1, "true"], workers=1)
    assert results[0].value is None and "pickle" in results[0].error
    assert results[1].value == 1.0


def test_constant_first_scores_are_noticed_once():
    watch = ConstantRewardWatch(3)
    assert [watch.observe(0.0) for _ in range(6)] == [False, False, True, False, False, False]
    watch = ConstantRewardWatch(3)
    assert not any(watch.observe(value) for value in (0.0, 0.0, 1.0, 1.0, 1.0, 1.0))


def test_a_constant_reward_is_warned_about_with_a_sample(caplog):
    async def main():
        async with RewardPool(f"{REWARDS}:constant", workers=2, warn_after=8) as pool:
            await pool.score([sample("gold")] * 20)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (record,) = caplog.records
    assert "field_rewards.py:constant" in record.getMessage() and "'gold'" in record.getMessage()


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"deadline": 0.0}])
def test_impossible_pools_are_refused(arguments):
    with pytest.raises(ValueError, match="at least 1 worker"):
        RewardPool(BY_ANSWER, **arguments)


def test_no_descriptors_are_left_open():
    run(["true"], workers=2)
    before = len(os.listdir("/proc/self/fd"))
    run(["true"], workers=2)
    assert len(os.listdir("/proc/self/fd")) <= before
