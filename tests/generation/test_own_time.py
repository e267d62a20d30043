"""Own time: what runs is counted, what waits is not."""

from __future__ import annotations

import asyncio
import time

import pytest

from meshy.generation.own_time import OwnTime


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_running_counts_and_waiting_does_not():
    async def part() -> int:
        spin(0.02)
        await asyncio.sleep(0.3)
        spin(0.02)
        return 7

    async def main() -> tuple[int, float]:
        work = OwnTime(part())
        return await work, work.seconds

    value, seconds = asyncio.run(main())
    assert value == 7 and seconds >= 0.04


def test_errors_and_cancellation_reach_the_work_and_come_out_again():
    seen = []

    async def part() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise ValueError("on its way out") from None

    async def main() -> None:
        task = asyncio.ensure_future(OwnTime(part()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(ValueError, match="on its way out"):
            await task

    asyncio.run(main())
    assert seen == ["cancelled"]
