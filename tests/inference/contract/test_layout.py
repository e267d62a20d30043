"""Each engine reports the checksums that the trainer expects of it, also with its tensors cut over two ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshy.generation import commands
from meshy.generation.expected import ExpectedChecksums
from meshy.generation.layout import layout_of
from meshy.generation.shared_tensors import SharedSegment
from meshy.generation.update_group import join, serve_store
from meshy.inference.sglang.interpreter import OF_THE_CHECKOUT
from tests.inference.contract.served import CONTEXT, Served
from tests.inference.models import byte_tokenizer
from tests.inference.real_sglang import HOST, sglang

DEADLINE = 60.0
Named = list[tuple[str, Tensor]]


def tensors_of(folder: Path) -> Named:
    return sorted(load_file(folder / "model.safetensors").items())


def differences(served: Served, named: Named) -> list[str]:
    config = json.loads((served.folder / "config.json").read_text())
    expected = ExpectedChecksums(config, layout_of(served.ok("/server_info"), config, torch.float32))
    for name, tensor in named:
        expected.add(name, tensor)
    return expected.compare(served.ok("/weights_checker", {"action": "checksum"})["ranks"])


def test_checksums_are_as_expected(served: Served):
    assert differences(served, tensors_of(served.folder)) == []
    assert len(differences(served, tensors_of(served.other))) >= 10
    assert served.load(served.other, "1")[0] == 200
    assert differences(served, tensors_of(served.other)) == []


def wide_model(folder: Path) -> Path:
    """Whose MLP SGLang cuts over two ranks without padding; the vocabulary it pads."""
    tokenizer = byte_tokenizer()
    shape = {"vocab_size": 330, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(**shape, **heads, **ends, max_position_embeddings=2 * CONTEXT, tie_word_embeddings=False)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.prove
@pytest.mark.skipif(not OF_THE_CHECKOUT.is_file(), reason="needs the environment of `make sglang`")
def test_two_ranks_of_sglang_take_weights_by_memory_and_by_broadcast(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # a core for each, where there is one NUMA node
    folder = wide_model(tmp_path / "wide")
    named = [(name, tensor + 0.01) for name, tensor in tensors_of(folder)]
    with sglang(folder, tp=2, context_length=CONTEXT) as server:
        served = Served("sglang", f"http://{HOST}:{server.plan.port}", folder, folder, CONTEXT)
        assert differences(served, tensors_of(folder)) == []
        served.pause("retract")
        tell(served, commands.BEGIN_UPDATE)
        segment, offset, views = SharedSegment(1 << 20), 0, []
        for name, tensor in named:
            views.append((name, segment.view(offset, tensor.shape, tensor.dtype).copy_(tensor)))
            offset += -(-tensor.nbytes // 64) * 64
        tell(served, commands.update_from_tensor([segment.payload(views, receivers=2)] * 2, 1))
        assert differences(served, named) == []
        named = [(name, tensor + 0.01) for name, tensor in named]
        store = serve_store(HOST, 0, DEADLINE)
        order = commands.join_group(HOST, store.port, first_rank=1, world_size=3, group="two", backend="gloo")
        joining = threading.Thread(target=tell, args=(served, order), daemon=True)
        joining.start()
        group = join(store, rank=0, world_size=3, name="two", backend="gloo", timeout=DEADLINE)
        joining.join(DEADLINE)
        names, shapes = [name for name, _ in named], [list(tensor.shape) for _, tensor in named]
        sent = group.broadcast(torch.cat([t.reshape(-1).view(torch.uint8) for _, t in named]), DEADLINE)
        tell(served, commands.update_from_broadcast(names, ["float32"] * len(named), shapes, "two", 2, packed=True))
        sent.wait()
        group.close()
        tell(served, commands.END_UPDATE)
        assert differences(served, named) == [] and served.version == "2"


def tell(served: Served, command: commands.Command) -> Any:
    return served.ok(command.path, command.body)
