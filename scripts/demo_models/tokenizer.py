"""The tokenizer that all demo models share: a student's tokens are its teacher's and its reward model's."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte (any text survives the round trip), and eight special tokens: 264 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[*SPECIAL[2:6]],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The same files, byte for byte, whatever the tokenizer was used for: the padding of its last call is saved too."""
    tokenizer.backend_tokenizer.enable_padding(direction="left", pad_id=tokenizer.pad_token_id, pad_token=PAD)
    tokenizer.save_pretrained(folder)


def prompt_of(a: int, b: int) -> str:
    """What the chat template makes of the task's message."""
    return f"<|user|>{a}+{b}<|end|><|assistant|>"
