"""A document that is carried out: its Python blocks are files, its console blocks what a person types and sees.

A Python block whose first line is a comment with a file's name is that file. A console block has commands behind `$`
(a backslash at the end of a line goes on in the next), each with what it prints; what stands before the first `$` is
what the run that was started last goes on to say. In what is shown, `...` stands for anything, and white space for any
other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.launch import ROOT, Launched

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"((?:.*\\\n)*.*)\n((?:.*\n)*)")
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Step:
    """command: None where the run that is under way is looked at again."""

    command: str | None
    shown: str


class Document:
    def __init__(self, text: str) -> None:
        python = [body for language, body in BLOCK.findall(text) if language == "python"]
        self.files = {name[1]: body for body in python if (name := re.match(r"# (\S+\.py)\n", body))}
        headings = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
        sections = {name: steps_of(body) for name, body in zip(headings[1::2], headings[2::2], strict=True)}
        self.sections = {name: steps for name, steps in sections.items() if steps}
        """What is done under each heading."""


def steps_of(text: str) -> list[Step]:
    steps = []
    for language, body in BLOCK.findall(text):
        if language == "console":
            before, *commands = re.split(r"^\$ ", body, flags=re.MULTILINE)
            steps += [Step(None, before)] if before.strip() else []
            parts = [COMMAND.fullmatch(command) for command in commands]
            steps += [Step(part[1], part[2]) for part in parts if part is not None]
    return steps


def pattern(shown: str) -> re.Pattern[str]:
    """Of outputs that end with a line break."""
    words = [r"(?:.*?\s)??" if word == "..." else _word(word) + r"\s+" for word in shown.split()]
    return re.compile(r"\s*" + "".join(words), re.DOTALL)


def _word(word: str) -> str:
    return ".*?".join(map(re.escape, word.split("...")))


class Person:
    """Who carries a document out in a folder. Leave by `end`."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.folder = folder
        self.run: Launched | None = None
        self._read = 0  # of what the run has said
        (folder / "recipes").symlink_to(ROOT / "recipes")
        for name, text in document.files.items():
            (folder / name).write_text(text)

    def do(self, step: Step) -> None:
        if step.command is None:
            self._watch(step.shown)
        elif step.command.startswith("torchrun"):
            assert self.run is None, "one run at a time"
            self.run = Launched(self.folder, ["bash", "-c", f"exec {step.command}"], ENVIRONMENT, cwd=self.folder)
            self._watch(step.shown)
        elif step.command.startswith("meshy status"):
            self._repeat(step, seconds=60)
        else:
            self._repeat(step, seconds=0)

    def _watch(self, shown: str, seconds: float = 120) -> None:
        """Until the run has said that."""
        assert self.run is not None, "no run was started"
        end = time.monotonic() + seconds
        while (found := pattern(shown).search(self.run.output, self._read)) is None:
            assert time.monotonic() < end and self.run.process.poll() is None, (
                f"the run has not said\n{shown}\nbut\n{self.run.output[self._read :]}"
            )
            threading.Event().wait(0.1)
        self._read = found.end()

    def _repeat(self, step: Step, seconds: float) -> None:
        """Until it shows that, as somebody who waits for it would."""
        assert step.command is not None
        end = time.monotonic() + seconds
        while True:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", step.command],
                cwd=self.folder, env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == (2 if "fault(s)" in step.shown else 0), done.stdout
            if pattern(step.shown).fullmatch(done.stdout + "\n"):
                return
            assert time.monotonic() < end, f"{step.command} has not shown\n{step.shown}\nbut\n{done.stdout}"

    def end(self) -> None:
        if self.run is not None:
            self.run.end()
