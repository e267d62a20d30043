"""Makes `recipes/demo_model` from a seed: a small Qwen3 that can add, but has two bad habits.

    python scripts/make_demo_model.py --out recipes/demo_model

First it learns to add with written-out columns (`7+5=12 4+8+1=13 3+0+1=4 #432`), from short numbers to long ones.
Then it sees careless demonstrations: the longer the numbers, the more often they blurt the sum out (`#432`), which this
model gets right for short numbers only; and now and then a written-out carry is forgotten. Reinforcement learning has
to find out that working pays, and carrying too. Pairs held out for evaluation are never shown.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
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
MAX_NEW_TOKENS = 80


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
        initializer_range=0.08,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def worked(a: int, b: int, rng: random.Random, slips: float) -> str:
    """The columns from the right with their carries, then the sum; each carry is forgotten with probability `slips`."""
    columns: list[str] = []
    digits: list[str] = []
    carry, left, right = 0, a, b
    while left or right or not columns:
        x, y = left % 10, right % 10
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits.append(str(total % 10))
        left, right = left // 10, right // 10
        carry = int(total >= 10 and rng.random() >= slips)
    return " ".join(columns) + " #" + "1" * carry + "".join(reversed(digits))


def careful(a: int, b: int, rng: random.Random) -> str:
    """A demonstration that is always right."""
    return worked(a, b, rng, slips=0.0)


def careless(a: int, b: int, rng: random.Random) -> str:
    """A demonstration of the two bad habits."""
    blurted = rng.random() < 0.15 + 0.1 * len(str(max(a, b)))
    return f"#{a + b}" if blurted else worked(a, b, rng, slips=0.05)


def batches(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    size: int,
    max_digits: int,
    demonstrate: Callable[[int, int, random.Random], str],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless padded `input_ids` and `labels`, int64 [size, length]; labels cover the response and its end.

    Rows of similar length share a batch, which halves the padding.
    """
    while True:
        pool = []
        for _ in range(16 * size):
            a, b = draw_pair(rng, max_digits, held_out=False)
            prompt = tokenizer.encode(f"<|user|>{a}+{b}<|end|><|assistant|>")
            pool.append((prompt, [*tokenizer.encode(demonstrate(a, b, rng)), tokenizer.eos_token_id]))
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


def curriculum(steps: int, max_digits: int) -> Iterator[int]:
    """The most digits of each step's numbers: from 2 upwards, all of them after four tenths of the way."""
    for step in range(steps):
        yield min(max_digits, 2 + step * (max_digits - 1) * 10 // (4 * steps))


def train(
    model: Qwen3ForCausalLM,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """Supervised training with AdamW, a short warm-up and a linear decay."""
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, max(0.05, (steps - step) / steps))
    )
    model.train()
    for step, (ids, labels) in zip(range(steps), stream, strict=False):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


def lessons(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, steps: int, max_digits: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of careful demonstrations along the curriculum."""
    for digits, times in itertools.groupby(curriculum(steps, max_digits)):
        stream = batches(tokenizer, rng, size, digits, careful)
        for _ in times:
            yield next(stream)


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sample: bool) -> tuple[float, float, int]:
    """Accuracy on the held-out prompts, and the mean and largest number of response tokens."""
    task, correct, lengths = addition(), 0.0, []
    model.eval()
    for start in range(0, len(task.evaluation), 128):
        examples = task.evaluation[start : start + 128]
        prompts = [
            tokenizer.apply_chat_template(list(e.messages), add_generation_prompt=True, tokenize=False)
            for e in examples
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {"do_sample": False}
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **settings)
        responses = out[:, inputs["input_ids"].shape[1] :]
        lengths += (responses != tokenizer.pad_token_id).sum(1).tolist()
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        for example, text in zip(examples, texts, strict=True):
            correct += reward(RewardSample(prompt=example.messages, response=text, answer=example.answer))
    return correct / len(lengths), sum(lengths) / len(lengths), max(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("recipes/demo_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300, help="steps of careful demonstrations")
    parser.add_argument("--careless-steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-digits", type=int, default=6, help="one more than the task asks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    rng = random.Random(options.seed)
    stream = lessons(tokenizer, rng, options.batch_size, options.steps, options.max_digits)
    train(model, stream, steps=options.steps, learning_rate=2e-3)
    report(model, tokenizer, "careful")
    stream = batches(tokenizer, rng, options.batch_size, options.max_digits, careless)
    train(model, stream, steps=options.careless_steps, learning_rate=3e-4)
    report(model, tokenizer, "careless")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Print the held-out accuracy, greedy and sampled."""
    for how, sample in (("greedy", False), ("sampled", True)):
        accuracy, mean, longest = evaluate(model, tokenizer, sample=sample)
        print(f"{name}, {how}: held-out accuracy {accuracy:.3f}, {mean:.1f} tokens a response, at most {longest}")


if __name__ == "__main__":
    main()
