"""Tokens to text and back, where the model folder has a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

REPLACEMENT = "�"  # what a decoder writes for bytes that are not (yet) a character


class Text:
    """The tokenizer of a model folder, or none: then texts are empty and prompts must be token ids."""

    def __init__(self, folder: Path) -> None:
        files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        has_one = any((folder / name).is_file() for name in files)
        self.tokenizer: PreTrainedTokenizerBase | None = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_one else None
        )

    def encode(self, text: str) -> list[int]:
        """Raises LookupError where there is no tokenizer."""
        if self.tokenizer is None:
            raise LookupError("The model folder has no tokenizer; send input_ids.")
        return list(self.tokenizer.encode(text))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def stop_finder(self, stop: Sequence[str]) -> Callable[[Sequence[int]], str | None] | None:
        """A function that tells which stop string the last token has completed; None without stop strings.

        Only the tail is decoded: a token of text is at least one byte long.
        """
        if not stop:
            return None
        tail = max(len(string.encode()) for string in stop) + 4

        def find(output: Sequence[int]) -> str | None:
            text = self.decode(output[-tail:], skip_special_tokens=False)
            return next((string for string in stop if string in text), None)

        return find


def end_tokens(folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Ids that end a generation: of the model's config, its generation config and its tokenizer together."""
    sources = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return frozenset(ids)


def trim(text: str, reason: dict[str, Any] | None, no_stop_trim: bool) -> str:
    """What the client sees: cut before the stop string that ended it; while it goes on, without half a character."""
    if reason is None:
        return text.rstrip(REPLACEMENT)
    matched = reason.get("matched")
    if isinstance(matched, str) and not no_stop_trim:
        at = text.find(matched)
        return text if at < 0 else text[:at]
    return text
