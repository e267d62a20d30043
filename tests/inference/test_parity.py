"""Log-probs and greedy tokens equal those of a plain `transformers` forward pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from meshy.inference.embedded import attention
from meshy.inference.embedded.engine import Engine
from meshy.inference.embedded.request import Request
from meshy.inference.embedded.runner import ModelRunner
from tests.inference.conftest import request
from tests.inference.models import CONTEXT, SHAPES, VOCAB

TOLERANCE = 1e-5


def reference(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(model, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[length - 1, vocab]: row t scores tokens[t + 1]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1] / temperature, -1)


def check(model, done: Request, temperature: float = 1.0) -> torch.Tensor:
    rows = logprobs_of(model, done.tokens, temperature)[len(done.prompt) - 1 :]
    expected = rows.gather(1, torch.tensor(done.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=TOLERANCE, rtol=0)
    return rows


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_transformers(shape, model_folders, new_bench):
    bench, model = new_bench(model_folders[shape], slots=6), reference(model_folders[shape])
    # 14 requests for 6 slots: prompts of 1 to 66 tokens, some equal, lengths that refill and compact slots.
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 5 * i)] for i in range(12)] + [[3, 4, 5]] * 2
    done = bench.run([request(str(i), p, 3 + (11 * i) % 40, seed=i) for i, p in enumerate(prompts)])
    for one in done:
        check(model, one)


def test_temperature_scales_and_top_p_does_not(folder, shared_bench):
    model = reference(folder)
    warm, cut = shared_bench.run(
        [
            request("warm", [5, 6, 7], 20, temperature=0.6),
            request("cut", [5, 6, 7], 20, top_p=0.5, top_k=9, min_p=0.01, temperature=1.7),
        ]
    )
    check(model, warm, 0.6)
    check(model, cut, 1.7)


def test_greedy_writes_the_likeliest_tokens(folder, shared_bench):
    model = reference(folder)
    (done,) = shared_bench.run([request("greedy", list(range(40, 60)), 60, temperature=0.0)])
    assert check(model, done).argmax(-1).tolist() == done.output


def test_prompt_tokens_and_candidates_are_scored(folder, shared_bench):
    model, prompt = reference(folder), list(range(30, 50))
    options = {"start": 4, "top": 3, "token_ids": (7, 1)}
    done, alone = shared_bench.run(
        [request("scored", prompt, 5, temperature=0.8, logprobs=options), request("plain", prompt, 5)]
    )
    raw = logprobs_of(model, done.tokens)
    expected = raw[4 : len(prompt) - 1].gather(1, torch.tensor(prompt[5:])[:, None])[:, 0]
    assert done.input_logprobs[0] is None and alone.input_logprobs is None
    torch.testing.assert_close(torch.tensor(done.input_logprobs[1:]), expected, atol=TOLERANCE, rtol=0)

    scaled = logprobs_of(model, done.tokens, 0.8)[len(prompt) - 1 :]
    values, ids = scaled.topk(3)
    assert [row.ids.tolist() for row in done.output_top] == ids.tolist()
    got = torch.tensor([row.logprobs.tolist() for row in done.output_top])
    torch.testing.assert_close(got, values, atol=TOLERANCE, rtol=0)
    chosen = torch.tensor([row.logprobs.tolist() for row in done.output_ids_logprobs])
    torch.testing.assert_close(chosen, scaled[:, [7, 1]], atol=TOLERANCE, rtol=0)
    assert len(done.input_top) == len(done.input_ids_logprobs) == len(done.input_logprobs)


def test_sliding_window_layers(tmp_path, new_bench):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=12, max_window_layers=1,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    assert "sliding_attention" in config.layer_types
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    bench, model = new_bench(tmp_path, slots=4), reference(tmp_path)
    for one in bench.run([request(str(n), list(range(n)), 40, seed=n) for n in (3, 11, 12, 30)]):
        check(model, one)


def test_a_model_with_foreign_layers_is_refused(tmp_path, new_bench):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, full_attention_interval=2,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="linear_attention"):
        new_bench(tmp_path)


def test_the_fused_attention_of_gpus_equals_the_exact_one():
    torch.manual_seed(0)
    query, keys, values = torch.randn(5, 2, 3, 16), torch.randn(5, 2, 160, 16), torch.randn(5, 2, 160, 16)
    lengths = torch.tensor([1, 32, 100, 129, 160])
    mask = torch.zeros(5, 1, 1, 160).masked_fill(torch.arange(160) >= lengths[:, None, None, None], -torch.inf)
    exact, fused = (
        attend(query, keys, values, mask, 0.25) for attend in (attention._attend_exactly, attention._attend_fused)
    )
    torch.testing.assert_close(fused, exact, atol=1e-6, rtol=1e-5)


def test_a_lower_precision_serves_and_takes_full_precision_weights(folder, model_folders):
    runner = ModelRunner(folder, device=torch.device("cpu"), dtype=torch.bfloat16, slots=4, context_length=CONTEXT)
    runner.weights.load_folder(model_folders["other"])
    assert {tensor.dtype for tensor in runner.model.parameters()} == {torch.bfloat16}
    done: list[Request] = []
    ended = threading.Event()
    engine = Engine(runner, max_running=4, deliver=lambda news: (done.extend(news), ended.set()))
    engine.start()
    engine.submit([request("low", list(range(40)), 100)])
    assert ended.wait(60)
    engine.close()
    rows = logprobs_of(reference(model_folders["other"]), done[0].tokens)[39:]
    expected = rows.gather(1, torch.tensor(done[0].output)[:, None])[:, 0]
    error = (torch.tensor(done[0].logprobs) - expected).abs()
    assert 1e-5 < error.mean() < 0.1  # bfloat16 keeps three digits
