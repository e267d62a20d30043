"""Whether the replicas hold the trainer's weights, bit for bit: checksums of every tensor, as each engine keeps it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshy.generation.expected import ExpectedChecksums
from meshy.generation.layout import Layout, UnknownLayout, layout_of

log = logging.getLogger("meshy.training.weights")


class WeightsDiffer(RuntimeError):
    """A replica holds other weights than the trainer."""


class Verifier:
    """model: its config.json. dtype: that an engine takes which is told none. servers: what each replica says of itself
    (`/server_info`), by URL; one whose tensors are kept in a way that is not known here is not verified."""

    def __init__(self, model: Mapping[str, Any], dtype: torch.dtype, servers: Mapping[str, Mapping[str, Any]]) -> None:
        self._model = model
        self._layouts: dict[str, Layout] = {}
        for url, server in servers.items():
            try:
                self._layouts[url] = layout_of(server, model, dtype)
            except UnknownLayout as error:
                log.warning("the weights of %s are not verified: %s", url, error)

    def expect(self, urls: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, ExpectedChecksums]:
        """By URL, what replicas that were given these tensors should report. One pass, one tensor at a time."""
        layouts = {url: self._layouts[url] for url in urls if url in self._layouts}
        expected = {layout: ExpectedChecksums(self._model, layout) for layout in layouts.values()}
        for name, tensor in tensors:
            for sums in expected.values():
                sums.add(name, tensor)
        return {url: expected[layout] for url, layout in layouts.items()}


def differences(
    expected: Mapping[str, ExpectedChecksums], reported: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[str]]:
    """By URL, the tensors in which a replica differs. reported: the `ranks` of `/weights_checker`."""
    wrong = {url: expected[url].compare(ranks) for url, ranks in reported.items() if url in expected}
    return {url: names for url, names in wrong.items() if names}


def refuse(wrong: Mapping[str, Sequence[str]], version: int) -> None:
    """Raises WeightsDiffer naming replica and tensors, unless there are none."""
    if wrong:
        told = "\n".join(
            f"  {url}: {len(names)} tensors, {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for url, names in wrong.items()
        )
        raise WeightsDiffer(f"after the publish of v{version}, replicas hold other weights than the trainer:\n{told}")
