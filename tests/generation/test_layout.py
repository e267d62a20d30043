"""Expected checksums equal those of tensors put together and cut by hand, and SGLang's own numbers."""

from __future__ import annotations

import pytest
import torch

from meshy.generation.checksum import tensor_checksum
from meshy.generation.expected import ExpectedChecksums
from meshy.generation.gpu_checksum import TILE, GpuChecksum
from meshy.generation.layout import Layout, UnknownLayout, layout_of

LAYER = "model.layers.0."
CONFIG = {
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": True,
}
SGLANG = {"version": "0.5.23", "tp_size": 2, "device": "cpu", "dtype": "float32", "quantization": None}


def checkpoint(vocabulary: int = 200) -> dict[str, torch.Tensor]:
    """A layer of hidden size 32 with head size 8; q, k and v have biases."""
    torch.manual_seed(0)
    sizes = {"self_attn.q_proj": 32, "self_attn.k_proj": 16, "self_attn.v_proj": 16}
    tensors = {"model.embed_tokens.weight": torch.randn(vocabulary, 32)}
    for name, size in sizes.items():
        tensors[f"{LAYER}{name}.weight"] = torch.randn(size, 32)
        tensors[f"{LAYER}{name}.bias"] = torch.randn(size)
    tensors[f"{LAYER}self_attn.o_proj.weight"] = torch.randn(32, 32)
    tensors[f"{LAYER}mlp.gate_proj.weight"] = torch.randn(128, 32)
    tensors[f"{LAYER}mlp.up_proj.weight"] = torch.randn(128, 32)
    tensors[f"{LAYER}mlp.down_proj.weight"] = torch.randn(32, 128)
    tensors[f"{LAYER}input_layernorm.weight"] = torch.randn(32)
    tensors["model.norm.weight"] = torch.randn(32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def expected(tensors: dict[str, torch.Tensor], layout: Layout, config=CONFIG) -> ExpectedChecksums:
    sums = ExpectedChecksums(config, layout)
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums


def test_the_embedded_engine_keeps_them_as_they_are_with_a_tied_one_once():
    tensors = checkpoint()
    sums = expected(tensors, Layout(torch.bfloat16)).of_rank(0)
    del tensors["lm_head.weight"]
    assert sums == {name: tensor_checksum(tensor.bfloat16()) for name, tensor in tensors.items()}
    untied = {**CONFIG, "tie_word_embeddings": False}
    assert "lm_head.weight" in expected(checkpoint(), Layout(torch.bfloat16), untied).of_rank(0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sglang_fuses_and_cuts(tp):
    tensors = checkpoint()
    sums = expected(tensors, Layout(torch.float32, fused=True, tp=tp))
    kv_cuts = min(tp, 2)  # ranks beyond the two key heads have the same ones

    def cut(name: str, rank: int, cuts: int, dim: int = 0) -> torch.Tensor:
        return tensors[LAYER + name].chunk(cuts, dim)[rank]

    for rank in range(tp):
        mine, kv_rank = sums.of_rank(rank), rank * kv_cuts // tp
        for kind in ("weight", "bias"):
            q = cut(f"self_attn.q_proj.{kind}", rank, tp)
            k, v = (cut(f"self_attn.{x}_proj.{kind}", kv_rank, kv_cuts) for x in "kv")
            assert mine[f"{LAYER}self_attn.qkv_proj.{kind}"] == tensor_checksum(torch.cat([q, k, v]))
        gate_up = [cut(f"mlp.{x}_proj.weight", rank, tp) for x in ("gate", "up")]
        assert mine[f"{LAYER}mlp.gate_up_proj.weight"] == tensor_checksum(torch.cat(gate_up))
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            assert mine[LAYER + name] == tensor_checksum(cut(name, rank, tp, dim=1))
        assert mine["model.norm.weight"] == tensor_checksum(tensors["model.norm.weight"])
        assert len(mine) == 8 and "lm_head.weight" not in mine


@pytest.mark.parametrize(("rows", "tp", "padded"), [(200, 1, 256), (256, 2, 256), (200, 8, 256), (200, 3, 384)])
def test_sglang_pads_the_vocabulary_with_zeros(rows, tp, padded):
    table = torch.randn(rows, 4)
    sums = expected({"model.embed_tokens.weight": table}, Layout(torch.float32, fused=True, tp=tp))
    shares = torch.cat([table, torch.zeros(padded - rows, 4)]).chunk(tp)
    for rank, share in enumerate(shares):
        assert sums.of_rank(rank) == {"model.embed_tokens.weight": tensor_checksum(share)}


def test_the_order_in_which_tensors_come_does_not_matter():
    tensors, layout = checkpoint(), Layout(torch.float32, fused=True)
    backwards = dict(reversed(tensors.items()))
    assert expected(backwards, layout).of_rank(0) == expected(tensors, layout).of_rank(0)


def test_what_differs_is_named():
    layout = Layout(torch.float32, fused=True, tp=2)
    sums = expected(checkpoint(), layout)
    ranks = [{"checksums": sums.of_rank(rank)} for rank in (0, 1)]
    assert sums.compare(ranks) == []
    assert sums.compare(ranks[:1]) == ["1 ranks answered, not 2"]
    ranks[1]["checksums"]["model.norm.weight"] = "0"
    del ranks[0]["checksums"]["model.embed_tokens.weight"]
    ranks[0]["checksums"]["rotary"] = "1"
    assert sums.compare(ranks) == [
        "model.embed_tokens.weight on rank 0 (not reported)",
        "rotary on rank 0 (unknown to the trainer)",
        "model.norm.weight on rank 1",
    ]
    unfinished = checkpoint()
    del unfinished[f"{LAYER}self_attn.v_proj.bias"]
    got = expected(unfinished, Layout(torch.float32, fused=True)).of_rank(0)
    assert f"{LAYER}self_attn.qkv_proj.bias" not in got and f"{LAYER}self_attn.qkv_proj.weight" in got


def test_the_layout_follows_from_what_a_server_says():
    assert layout_of({"version": "meshy-embedded", "dtype": "auto"}, {}, torch.bfloat16) == Layout(torch.bfloat16)
    assert layout_of(SGLANG, CONFIG, torch.bfloat16) == Layout(torch.float32, fused=True, tp=2)
    on_gpu = layout_of({**SGLANG, "device": "cuda", "dtype": "half"}, CONFIG, torch.bfloat16)
    assert on_gpu == Layout(torch.float16, fused=True, tp=2, on_gpu=True)


@pytest.mark.parametrize(
    ("server", "config", "message"),
    [
        ({}, {"model_type": "mamba"}, "how SGLang keeps the tensors of a 'mamba'"),
        ({"quantization": "fp8"}, {}, "quantised"),
        ({"pp_size": 2}, {}, "pp_size=2"),
        ({"dp_size": 2}, {}, "dp_size=2"),
        ({}, {"intermediate_size": 96}, "pads intermediate_size=96 to a multiple of 64"),
        ({"tp_size": 4}, {}, "pads num_key_value_heads=2"),
    ],
)
def test_layouts_that_are_not_known_are_refused(server, config, message):
    with pytest.raises(UnknownLayout, match=message):
        layout_of({**SGLANG, **server}, {**CONFIG, **config}, torch.float32)


# What SGLang's kernel gives for the numbers 0, 1, ... of so many elements, run by triton's interpreter.
KERNEL = [
    (3, torch.float32, "7547b1a13846e61b"),
    (5, torch.bfloat16, "734f38267db36804"),
    (8192, torch.float32, "bd3bf69e6ae40122"),
    (33333, torch.bfloat16, "a5e8b6f7430565b2"),
    (1064965, torch.float32, "63a3099e3a6fb425"),
]


@pytest.mark.parametrize(("count", "dtype", "number"), KERNEL)
def test_the_gpu_checksum_is_the_kernels_number_whatever_the_pieces(count, dtype, number):
    raw = torch.arange(count).to(dtype).view(torch.uint8)
    for size in (raw.numel(), 7, TILE * 4 * 3 + 1):
        checksum = GpuChecksum()
        for piece in raw.split(max(size, raw.numel() // 50)):
            checksum.update(piece)
        assert checksum.hexdigest() == number


def test_an_engine_on_a_gpu_is_expected_to_give_the_kernels_numbers():
    sums = expected({"model.norm.weight": torch.arange(3.0)}, Layout(torch.float32, fused=True, on_gpu=True))
    assert sums.of_rank(0) == {"model.norm.weight": KERNEL[0][2]}
