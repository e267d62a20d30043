"""SGLang's command line and environment, the choice of the engine, and what is refused: everything without SGLang."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from meshy.inference.choice import choose
from meshy.inference.config import InferenceConfig
from meshy.inference.model_config import ModelConfig, read_model_config, sharding_faults
from meshy.inference.preflight import reserved_faults, told_faults
from meshy.inference.sglang import interpreter
from meshy.inference.sglang.arguments import (
    CPU_CACHE_BYTES,
    VERSION,
    ServerPlan,
    as_arguments,
    cpu_cache_tokens,
    server_arguments,
    server_dtype,
    server_environment,
)
from meshy.inference.sglang.last_words import last_words

MODEL = ModelConfig(Path("/model"), ("Qwen3ForCausalLM",), "bfloat16", 8, 2, 64, 4, 4096, False)
PLAN = ServerPlan(
    python=Path("/python"),
    model=MODEL,
    host="10.0.0.1",
    port=9000,
    rendezvous="10.0.0.1:9001",
    on_gpu=True,
    dtype="auto",
    context_length=1000,
    max_running_requests=16,
    weight_version=3,
    random_seed=7,
)


def given(plan: ServerPlan) -> dict[str, str | None]:
    """The command line as {name: value}, None for a bare flag."""
    words = server_arguments(plan)
    names = [index for index, word in enumerate(words) if word.startswith("--")]
    return {
        words[index]: words[index + 1] if index + 1 < len(words) and index + 1 not in names else None for index in names
    }


def change(**fields) -> ServerPlan:
    return dataclasses.replace(PLAN, **fields)


def test_a_replica_on_one_host():
    told = given(change(tp=4, ep=2, memory_fraction=0.7, memory_saver=True, quantization="fp8"))
    assert told["--tp-size"] == "4" and told["--ep-size"] == "2" and told["--mem-fraction-static"] == "0.7"
    assert told["--enable-memory-saver"] is None and told["--quantization"] == "fp8"
    assert told["--nccl-port"] == "9001" and "--dist-init-addr" not in told and "--dp-size" not in told
    assert told["--device"] == "cuda" and told["--dtype"] == "bfloat16" and told["--weight-version"] == "3"
    assert told["--context-length"] == "1006" and "--max-total-tokens" not in told


def test_a_replica_over_hosts_meets_at_its_leaders_port():
    told = given(change(tp=16, nodes=2, node=1))
    assert told["--nnodes"] == "2" and told["--node-rank"] == "1" and told["--dist-init-addr"] == "10.0.0.1:9001"
    assert "--nccl-port" not in told


def test_several_engines_behind_one_endpoint():
    told = given(change(tp=2, dp=4))
    assert told["--dp-size"] == "4" and "--nccl-port" not in told


def test_on_cpu():
    told = given(change(on_gpu=False))
    assert told["--sleep-on-idle"] is None and told["--device"] == "cpu"
    assert told["--max-total-tokens"] == str(16 * 1006)
    environment = server_environment(change(on_gpu=False, threads=3), {"OMP_NUM_THREADS": "9"}, Path("/scratch"))
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["OMP_NUM_THREADS"] == "3"


def test_the_cache_on_cpu_stays_within_reason_and_holds_one_episode():
    token = MODEL.cache_bytes_per_token(4)
    assert token == 2 * 4 * 2 * 64 * 4
    assert cpu_cache_tokens(change(max_running_requests=10**6)) == CPU_CACHE_BYTES // token
    assert cpu_cache_tokens(change(context_length=10**7)) == 10**7 + 7


def test_the_environment_is_the_services_without_torchruns():
    environment = {
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "MESHY_PARENT": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "HOME": "/h",
    }
    told = server_environment(PLAN, environment, Path("/scratch"))
    assert told == {
        "CUDA_VISIBLE_DEVICES": "3",
        "HOME": "/h",
        "TMPDIR": "/scratch",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_only_the_margin_may_go_beyond_the_models_context():
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    assert name in server_environment(change(context_length=4096), {}, Path("/s"))
    assert name not in server_environment(change(context_length=4090), {}, Path("/s"))
    assert name not in server_environment(change(context_length=5000), {}, Path("/s"))  # SGLang refuses it in words


def test_arguments_of_every_kind():
    values = {"one": 1, "yes": True, "no": False, "nothing": None, "several": [1, 2], "options": {"a": 1}}
    assert as_arguments(values) == ["--one", "1", "--yes", "--several", "1", "2", "--options", '{"a": 1}']


@pytest.mark.parametrize(
    ("chosen", "own", "on_gpu", "expected"),
    [
        ("auto", "float32", False, "float32"),
        ("auto", "float32", True, "bfloat16"),
        ("auto", "float16", True, "float16"),
        ("bfloat16", "float32", False, "bfloat16"),
        ("float32", "bfloat16", True, "float32"),
    ],
)
def test_types(chosen: str, own: str, on_gpu: bool, expected: str):
    assert server_dtype(chosen, own, on_gpu) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "said"),
    [
        (8, 2, 2, None),
        (8, 2, 8, None),  # key-value heads are repeated
        (8, 2, 3, "8 attention heads do not divide by tp=3; choose one of [1, 2, 4, 8]"),
        (24, 6, 4, "6 key-value heads and tp=4 must divide one another"),
    ],
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, tp: int, said: str | None):
    faults = sharding_faults(dataclasses.replace(MODEL, heads=heads, kv_heads=kv_heads), tp)
    assert (said is None and not faults) or (said is not None and said in faults[0])


def test_a_models_config_is_read(folder: Path):
    model = read_model_config(folder)
    assert (model.heads, model.kv_heads, model.head_dim, model.layers) == (4, 2, 16, 2)
    assert model.dtype == "float32" and model.architectures == ("Qwen3ForCausalLM",) and not model.own_code


def test_what_meshy_sets_itself_is_refused_with_what_to_set():
    faults = reserved_faults(InferenceConfig(server_args={"tp_size": 2, "port": 1, "attention_backend": "fa3"}))
    assert faults == [
        "server_args.tp_size: Meshy sets this itself; set tp instead",
        "server_args.port: Meshy sets this itself; leave it out",
    ]


FINE = {"version": VERSION, "unknown_architectures": []}
OPTIONS = {"attention_backend": "attention_backend", "tp": "tp_size", "tp_size": "tp_size"}


@pytest.mark.parametrize(
    ("told", "server_args", "said"),
    [
        ({"version": None}, {}, "SGLang is not installed in /python; install it there (`pip install sglang=="),
        ({"version": "0.4.1"}, {}, f"/python has SGLang 0.4.1, and Meshy supports {VERSION}"),
        ({**FINE, "unknown_architectures": ["Foo"]}, {}, "cannot load a Foo (/model/config.json)"),
        ({**FINE, "sees_gpu": False}, {}, "this machine has GPUs, but the torch of /python sees none"),
        ({**FINE, "options": OPTIONS}, {"attention_backnd": "x"}, "(did you mean 'attention_backend'?)"),
        ({**FINE, "options": OPTIONS}, {"tp": 2}, "server_args.tp: Meshy sets this itself; set tp instead"),
        ({**FINE, "refused": "argument --x: bad"}, {}, "refuses them: argument --x: bad"),
    ],
)
def test_what_an_interpreter_says_becomes_a_fault(told, server_args, said: str):
    (fault,) = told_faults(told, InferenceConfig(server_args=server_args), MODEL, Path("/python"))
    assert said in fault


def test_the_last_words_begin_with_the_last_traceback():
    lines = [
        "Loading: 10%|##   | 1/10",
        "a",
        "",
        "[12:00] hit: Traceback (most recent call last):",
        '  File "x"',
        "E: 1",
    ]
    assert last_words([*lines, "SIGQUIT received"]) == [*lines[3:], "SIGQUIT received"]
    assert last_words([f"{n}" for n in range(50)]) == [f"{n}" for n in range(30, 50)]
    assert last_words([]) == ["(it has written nothing)"]
    assert len(last_words(["Traceback (most recent call last)", *map(str, range(100))])) == 41


def test_auto_takes_sglang_where_there_is_a_gpu_and_sglang(monkeypatch: pytest.MonkeyPatch):
    assert choose(InferenceConfig(), on_gpu=False).why == "auto: there is no GPU"
    assert choose(InferenceConfig(engine="embedded"), on_gpu=True).engine == "embedded"
    assert choose(InferenceConfig(engine="sglang"), on_gpu=False).engine == "sglang"
    if not interpreter.installed_here():
        choice = choose(InferenceConfig(), on_gpu=True)
        assert (choice.engine, choice.why) == ("embedded", "auto: SGLang is not installed in this interpreter")
        named = choose(InferenceConfig(python=sys.executable), on_gpu=True)
        assert named.engine == "embedded" and "has SGLang None" in named.why


def test_an_interpreter_that_cannot_be_asked(tmp_path: Path):
    with pytest.raises(interpreter.InterpreterError, match="there is no interpreter"):
        interpreter.ask(tmp_path / "python")
    with pytest.raises(interpreter.InterpreterError, match="exit code 1"):
        interpreter.ask(Path("/bin/false"))
    (tmp_path / "text").write_text("no program")
    with pytest.raises(interpreter.InterpreterError, match="cannot be run"):
        interpreter.ask(tmp_path / "text")


def test_this_interpreter_is_asked():
    assert interpreter.ask(Path(sys.executable))["version"] == (VERSION if interpreter.installed_here() else None)
