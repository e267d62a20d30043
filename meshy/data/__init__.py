"""Datasets and the order in which their prompts are used.

A dataset is a function that returns a `Task`; a recipe names it by its import path.
"""

from meshy.data.task import Example, Task

__all__ = ["Example", "Task"]
