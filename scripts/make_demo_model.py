"""Makes `recipes/demo_model` from a seed: a small Qwen3 that has seen addition, but mostly blurts the answer out.

    python scripts/make_demo_model.py --out recipes/demo_model

It is trained on demonstrations of two kinds. Most state the sum at once (`#432`), which this model gets right for short
numbers only; the others write the columns out first (`7+5=12 4+8+1=13 3+0+1=4 #432`). Reinforcement learning has to
find out which habit pays, and to make the long way reliable. Held-out pairs are never shown.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from meshy.data.addition import addition, draw_pair
from meshy.rewards.addition import reward
from meshy.rewards.sample import RewardSample

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte (any text survives the round trip), and eight special tokens: 264 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=[*SPECIAL[2:6]],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """About a million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def worked(a: int, b: int) -> str:
    """The columns from the right with their carries, then the sum."""
    columns, carry, left, right = [], 0, a, b
    while left or right or not columns:
        x, y = left % 10, right % 10
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        left, right, carry = left // 10, right // 10, total // 10
    return " ".join(columns) + f" #{a + b}"


def direct(a: int, b: int) -> str:
    """The sum at once."""
    return f"#{a + b}"


def batches(tokenizer, rng: random.Random, size: int, max_digits: int, direct_share: float):
    """Endless padded `input_ids` and `labels` [size, length]; labels cover the response and its end.

    Rows of similar length share a batch, which halves the padding.
    """
    while True:
        pool = []
        for _ in range(16 * size):
            a, b = draw_pair(rng, max_digits, held_out=False)
            demonstration = direct(a, b) if rng.random() < direct_share else worked(a, b)
            prompt = f"<|user|>{a}+{b}<|end|><|assistant|>"
            pool.append((tokenizer.encode(prompt), [*tokenizer.encode(demonstration), tokenizer.eos_token_id]))
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            rows = pool[start : start + size]
            length = max(len(prompt) + len(response) for prompt, response in rows)
            padding = [length - len(prompt) - len(response) for prompt, response in rows]
            ids = [p + r + [tokenizer.pad_token_id] * n for (p, r), n in zip(rows, padding, strict=True)]
            labels = [[IGNORED] * len(p) + r + [IGNORED] * n for (p, r), n in zip(rows, padding, strict=True)]
            yield torch.tensor(ids), torch.tensor(labels)


def train(model, tokenizer, *, seed: int, steps: int, size: int, max_digits: int, direct_share: float) -> None:
    """Supervised training with AdamW, a short warm-up and a linear decay."""
    rng, started = random.Random(seed), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, max(0.05, (steps - step) / steps))
    )
    demonstrations = batches(tokenizer, rng, size, max_digits, direct_share)
    for step in range(steps):
        ids, targets = next(demonstrations)
        loss = model(input_ids=ids, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


@torch.no_grad()
def evaluate(model, tokenizer, max_digits: int, *, sample: bool) -> tuple[float, float]:
    """Accuracy on the held-out prompts, and the mean number of response tokens."""
    task, correct, lengths = addition(max_digits=max_digits), 0.0, 0
    tokenizer.padding_side = "left"
    for start in range(0, len(task.evaluation), 128):
        examples = task.evaluation[start : start + 128]
        prompts = [
            tokenizer.apply_chat_template(list(e.messages), add_generation_prompt=True, tokenize=False)
            for e in examples
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(**inputs, max_new_tokens=96, do_sample=sample, top_k=0)
        responses = out[:, inputs["input_ids"].shape[1] :]
        lengths += int((responses != tokenizer.pad_token_id).sum())
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        for example, text in zip(examples, texts, strict=True):
            correct += reward(RewardSample(prompt=example.messages, response=text, answer=example.answer))
    tokenizer.padding_side = "right"
    return correct / len(task.evaluation), lengths / len(task.evaluation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("recipes/demo_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-digits", type=int, default=6)
    parser.add_argument("--direct-share", type=float, default=0.6, help="share of demonstrations without the working")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(
        model,
        tokenizer,
        seed=options.seed,
        steps=options.steps,
        size=options.batch_size,
        max_digits=options.max_digits,
        direct_share=options.direct_share,
    )
    model.eval()
    for name, sample in (("greedy", False), ("sampled", True)):
        accuracy, length = evaluate(model, tokenizer, options.max_digits, sample=sample)
        print(f"held-out accuracy, {name}: {accuracy:.3f}, {length:.1f} tokens a response")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
