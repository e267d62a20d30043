"""Work done together: its first error comes out as it was raised."""

from __future__ import annotations

import asyncio

import pytest

from meshy.service.tasks import together, with_task_group


async def after(wait: asyncio.Event, error: Exception | None = None) -> int:
    await wait.wait()
    if error is not None:
        raise error
    return 7


def test_results_come_in_order():
    async def one(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert asyncio.run(together(one(value) for value in range(5))) == list(range(5))


def test_the_first_error_ends_the_others_and_is_raised_as_it_is():
    cause = OSError("the cause")

    async def main() -> None:
        never, now = asyncio.Event(), asyncio.Event()
        now.set()
        error = ValueError("first")
        error.__cause__ = cause
        await together([after(never), after(now, error), after(never)])

    with pytest.raises(ValueError, match="first") as caught:
        asyncio.run(main())
    assert caught.value.__cause__ is cause and caught.value.__context__ is None


def test_an_error_of_a_task_ends_the_work_that_started_it():
    async def work(group: asyncio.TaskGroup) -> None:
        now = asyncio.Event()
        now.set()
        group.create_task(after(now, ValueError("of a task")))
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="of a task") as caught:
        asyncio.run(with_task_group(work))
    assert caught.value.__context__ is None
