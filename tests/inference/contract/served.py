"""One running engine that serves the contract's model, and the ways in which the tests ask it."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.inference.models import JSON, byte_tokenizer, call
from tests.inference.recorded import FLUSHED

IDS = list(range(40, 52))
CONTEXT = 1024  # long enough that a request still runs when a command comes right after its first token
RUNNING = 8
ENDLESS = {"max_new_tokens": CONTEXT - len(IDS), "ignore_eos": True}
ENGINES = ("embedded", "sglang")


@dataclass
class Served:
    """An engine behind a URL. folder: the model that it was started with. limit: the context length that it names."""

    name: str
    url: str
    folder: Path
    other: Path
    limit: int

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, str | None, Any]:
        return call(self.url, path, body, method)

    def ok(self, path: str, body: Any = None) -> Any:
        """The answer's body; the status must be 200."""
        status, _, answer = self.call(path, body)
        assert status == 200, (path, status, answer)
        return answer

    def generate(self, **body: Any) -> tuple[int, str | None, Any]:
        return self.call("/generate", {"input_ids": IDS, **body})

    def written(self, **body: Any) -> Any:
        """The answer of `/generate`, which must be 200."""
        return self.ok("/generate", {"input_ids": IDS, **body})

    def greedy(self, count: int, **body: Any) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return self.written(sampling_params=sampling, return_logprob=True, **body)

    def in_background(self, **body: Any) -> Future[Any]:
        """`generate` on a thread of its own."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.generate(**body))
            except Exception as error:  # noqa: BLE001 - the waiting test gets it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def pause(self, mode: str) -> None:
        self.ok("/pause_generation", {"mode": mode})

    def go_on(self) -> None:
        self.ok("/continue_generation", {})

    @property
    def version(self) -> str:
        return self.ok("/model_info")["weight_version"]

    def load(self, folder: Path, version: str, **options: Any) -> tuple[int, str | None, Any]:
        body = {"model_path": str(folder), "weight_version": version, **options}
        return self.call("/update_weights_from_disk", body)

    def flush(self) -> None:
        """Drop the cache, as soon as nothing runs: SGLang answers a request a moment before it is done with it."""
        _soon(lambda: self.call("/flush_cache", method="POST") == (200, None, FLUSHED))

    def restore(self) -> None:
        """The first weights as version 0, as soon as nothing runs: until then they would be refused, or loaded without
        dropping the cache of others.
        """
        _soon(lambda: self.load(self.folder, "0")[0] == 200)

    def text_of(self, tokens: list[int]) -> str:
        """The text of these tokens. The model's vocabulary is larger than its tokenizer's, and for ids beyond that one
        SGLang shows token 0 and the embedded engine nothing.
        """
        tokenizer = byte_tokenizer()
        if self.name == "sglang":
            tokens = [0 if token >= len(tokenizer) else token for token in tokens]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def checksums(self) -> dict[str, str]:
        """Of the live tensors, by name."""
        answer = self.ok("/weights_checker", {"action": "checksum"})
        assert answer["success"]
        return answer["ranks"][0]["checksums"]


def _soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "still busy after 20 s"


class Stream:
    """A streaming request, read event by event, so that a test knows that it runs."""

    def __init__(self, served: Served, **body: Any) -> None:
        data = json.dumps({"input_ids": IDS, "stream": True, **body}).encode()
        request = urllib.request.Request(served.url + "/generate", data=data, headers=JSON)
        self.response = urllib.request.urlopen(request, timeout=60)
        self.kind = self.response.headers["content-type"]
        self._events = (line[6:].strip() for line in self.response if line.startswith(b"data: "))

    def next(self) -> Any:
        event = next(self._events)
        return event.decode() if event == b"[DONE]" else json.loads(event)

    def until(self, count: int) -> Any:
        """The first event with at least `count` tokens."""
        while len((event := self.next())["output_ids"]) < count:
            pass
        return event

    def last(self) -> Any:
        """The last event before [DONE]."""
        *_, last, done = self._events
        assert done == b"[DONE]"
        return json.loads(last)


def spans(answer: Any) -> list[tuple[str, int, int]]:
    """(version, start, end) of each span of an answer; they must cover it without a gap."""
    found = [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]
    ends = [0, *(end for _, _, end in found)]
    assert [start for _, start, _ in found] == ends[:-1] and ends[-1] == len(answer["output_ids"])
    return found
