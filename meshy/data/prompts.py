"""From an example's chat messages to token ids, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshy.data.task import Example
from meshy.models import read_config


class PromptError(ValueError):
    """A prompt that cannot be put to the model; the message names the example."""


class Chat:
    """A model's chat template and tokenizer.

    folder: the model's, in Hugging Face format. options: passed to the chat template.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._tokenizer = load_tokenizer(folder)
        self._options = dict(options or {})
        if self._tokenizer.chat_template is None:
            raise PromptError(f"the tokenizer in {folder} has no chat template; add a chat_template.jinja there")

    def encode(self, example: Example) -> list[int]:
        """The ids of the messages and of the opening of the answer. PromptError if the template refuses them."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in example.messages],
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise PromptError(f"the chat template refuses prompt {example.id!r}: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template has written them already

    @cached_property
    def vocab_size(self) -> int:
        """Ids that the model has an embedding for; some of them may be no token of the tokenizer."""
        return embedded_ids(self._folder) or len(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, special tokens left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class PromptTokens:
    """The token ids of a dataset's prompts, each worked out once.

    limit: the most tokens that a prompt may have.
    """

    def __init__(self, chat: Chat, examples: Sequence[Example], limit: int) -> None:
        self.examples = examples
        self._chat = chat
        self._limit = limit
        self._tokens: dict[int, list[int]] = {}

    def __getitem__(self, row: int) -> list[int]:
        """PromptError where the prompt leaves no room for a response, or the template refuses it."""
        if row not in self._tokens:
            tokens = self._chat.encode(self.examples[row])
            if not 0 < len(tokens) <= self._limit:
                raise PromptError(
                    f"prompt {self.examples[row].id!r} has {len(tokens)} tokens; context_length leaves room for 1 to "
                    f"{self._limit} of them: raise context_length, or leave such prompts out"
                )
            self._tokens[row] = tokens
        return self._tokens[row]

    def check_longest(self, count: int = 256) -> None:
        """Work out the prompts with the most characters, so that one that is too long is found at the start."""
        for row in longest(self.examples, count):
            self[row]


def longest(examples: Sequence[Example], count: int) -> list[int]:
    """The rows with the most characters."""
    sizes = [sum(len(str(m.get("content"))) for m in example.messages) for example in examples]
    return sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))[:count]


def embedded_ids(folder: Path) -> int | None:
    """How many ids the model has an embedding for, as its config.json says."""
    config = read_config(folder)
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. What `tokenizer.json` says suffices, and loading it so takes a third of the time
    and no torch; only a folder without one needs AutoTokenizer."""
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
