"""Work done together, of which the first error counts: raised as it is, not in an ExceptionGroup and not on top of the
cancellation of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def with_task_group(work: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> None:
    """Do `work` with a group for its tasks, and wait for these. The first error of any ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            await work(group)
        return
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    raise first


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all, in order. The first error of any ends the others."""
    tasks: list[asyncio.Task[Result]] = []

    async def begin(group: asyncio.TaskGroup) -> None:
        tasks.extend(group.create_task(work) for work in works)

    await with_task_group(begin)
    return [task.result() for task in tasks]
