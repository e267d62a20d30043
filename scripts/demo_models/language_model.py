"""A small Qwen3 that answers: its shape, its accuracy on held-out prompts, its folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from meshy.data.addition import addition
from meshy.rewards.addition import reward
from meshy.rewards.sample import RewardSample
from scripts.demo_models.tokenizer import save_tokenizer

MAX_NEW_TOKENS = 80


def make_model(tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    """With random weights, from torch's seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.08,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    return model


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sample: bool, limit: int | None = None
) -> tuple[float, float, int]:
    """Accuracy on the held-out prompts (the first `limit` of them), and the mean and largest number of response tokens.

    sample: at temperature 1, unfiltered; else greedily.
    """
    examples, correct, lengths = addition().evaluation[:limit], 0.0, []
    model.eval()
    for start in range(0, len(examples), 128):
        batch = examples[start : start + 128]
        prompts = [
            tokenizer.apply_chat_template(list(e.messages), add_generation_prompt=True, tokenize=False) for e in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {"do_sample": False}
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **settings)
        responses = out[:, inputs["input_ids"].shape[1] :]
        lengths += (responses != tokenizer.pad_token_id).sum(1).tolist()
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        for example, text in zip(batch, texts, strict=True):
            correct += reward(RewardSample(prompt=example.messages, response=text, answer=example.answer))
    return correct / len(lengths), sum(lengths) / len(lengths), max(lengths)


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Print the held-out accuracy, greedy and sampled."""
    for how, sample in (("greedy", False), ("sampled", True)):
        accuracy, mean, longest = evaluate(model, tokenizer, sample=sample)
        print(f"{name}, {how}: held-out accuracy {accuracy:.3f}, {mean:.1f} tokens a response, at most {longest}")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """In Hugging Face format."""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "model.safetensors").chmod(0o644)
