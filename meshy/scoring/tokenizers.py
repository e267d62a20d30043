"""Whether two models read the same tokens, and the map between them where they do not. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshy.importing import ImportPathError, load
from meshy.models import ModelError


class TokenMapError(ValueError):
    """A map from the policy's tokens to another model's that cannot be used; the message says why."""


def tokens_by_id(folder: Path) -> dict[int, str]:
    """Every token of a folder's tokenizer, those added to it among them. Raises ModelError."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # of whatever kind, for it has no class of its own
            raise ModelError(f"{folder / 'tokenizer.json'} is no tokenizer ({error}); fetch it again") from error
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    else:
        from transformers import AutoTokenizer

        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    return {id: token for token, id in vocabulary.items()}


def first_difference(policy: dict[int, str], other: dict[int, str]) -> tuple[int, str | None, str | None] | None:
    """The lowest id that does not mean the same in both, and what it means in each; None where there is none."""
    for id in sorted(policy.keys() | other.keys()):
        if policy.get(id) != other.get(id):
            return id, policy.get(id), other.get(id)
    return None


def load_token_map(source: str | Callable[..., Any], policy: Path, own: Path) -> list[int]:
    """From a JSON file, or what a function of both folders returns. Raises TokenMapError."""
    if isinstance(source, str) and source.endswith(".json"):
        try:
            entries = json.loads(Path(source).read_text())
        except (OSError, ValueError) as error:
            raise TokenMapError(f"{source} cannot be read as JSON: {error}") from error
    else:
        try:
            entries = load(source)(policy, own)
        except ImportPathError as error:
            raise TokenMapError(str(error)) from error
        except Exception as error:
            raise TokenMapError(f"{source} raised {type(error).__name__}: {error}") from error
    if not isinstance(entries, Sequence) or isinstance(entries, str) or any(type(id) is not int for id in entries):
        raise TokenMapError(f"{source} gives no list of token ids, but a {type(entries).__name__}: {entries!r:.100}")
    return list(entries)


def token_map_faults(entries: Sequence[int], policy_vocab: int, own_vocab: int) -> list[str]:
    """entries: see `TeacherConfig.token_map`; the rest: sizes of both vocabularies."""
    faults = []
    if len(entries) != policy_vocab:
        faults.append(
            f"token_map: it has {len(entries)} entries for the {policy_vocab} ids of the policy's vocabulary; give one "
            "for each, -1 where this model has no such token"
        )
    if (beyond := next((i for i, id in enumerate(entries) if not -1 <= id < own_vocab), None)) is not None:
        faults.append(
            f"token_map: entry {beyond} is {entries[beyond]}, but this model's ids go from 0 to {own_vocab - 1}; -1 "
            "stands for none"
        )
    if all(id < 0 for id in entries):
        faults.append("token_map: it names no token at all; entry i is this model's own id of the policy's token i")
    seen: dict[int, int] = {}
    for i, id in enumerate(entries):
        if id >= 0 and seen.setdefault(id, i) != i:
            faults.append(f"token_map: entries {seen[id]} and {i} are both {id}; the same token would be counted twice")
            break
    return faults
