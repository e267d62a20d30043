"""derive_topology: who runs where, on which ports; and everything that it refuses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, QueueConfig, Recipe, RecipeError, Sampling, ServiceGroup
from meshy.topology import PORT_SPAN, Gpu, derive_topology, gpu_list, with_base_port
from tests.core.roles import Engine, Learner, Scorer, Writer, recipe_of


def faults_of(recipe: Recipe, gpus: tuple[Gpu, ...] = gpu_list(1, 2)) -> list[str]:
    with pytest.raises(RecipeError) as error:
        derive_topology(recipe, gpus)
    return error.value.faults


def colocated(**changes) -> Recipe:
    """Four engines of one GPU and one learner of four, on the same GPUs."""
    base = recipe_of(engines=4, ranks=4)
    inference, trainer, rollout = base.groups
    trainer = dataclasses.replace(trainer, colocate_with="inference", wait_for=())
    ring = ColocationRing(id="r", members=(("inference", FALLBACK), ("trainer", ON_DEMAND)))
    return dataclasses.replace(base, **{"groups": (inference, trainer, rollout), "rings": (ring,), **changes})


def test_groups_take_gpus_in_order() -> None:
    topology = derive_topology(recipe_of(engines=2, ranks=2), gpu_list(1, 4))
    assert [(r.name, r.gpus) for r in topology.replicas] == [
        ("inference.0", (0,)), ("inference.1", (1,)), ("trainer.0", (2, 3)), ("rollout.0", ()),
    ]  # fmt: skip
    assert [(p.name, p.launcher, p.gpus) for p in topology.processes] == [
        ("inference.0", 0, (0,)), ("inference.1", 1, (1,)), ("trainer.0", 2, (2,)), ("trainer.0.rank1", 3, (3,)),
        ("rollout.0", 0, ()),
    ]  # fmt: skip


def test_ports_follow_the_documented_rule() -> None:
    topology = derive_topology(recipe_of(engines=1, ranks=1), gpu_list(1, 2), base_port=12000)
    assert topology.controller.ports == (12008, 12009, 12010, 12011)
    assert topology.storage[0].ports == (12016,)
    assert topology.replica("inference.0").endpoint_port == 12512
    assert topology.replica("trainer.0").endpoint_port == 12512 + 64
    assert topology.replica("trainer.0").distributed_port == 12512 + 65
    assert topology.replica("trainer.0").weights_port == 12512 + 67
    assert topology.replica("rollout.0").leader.admin_port == 12128 + 2


def test_colocated_groups_share_gpus_but_no_port() -> None:
    topology = derive_topology(colocated(), gpu_list(1, 4))
    assert topology.rings[0].gpus == (0, 1, 2, 3)
    assert topology.rings[0].keeper == 0
    assert topology.replica("trainer.0").gpus == (0, 1, 2, 3)
    ports = topology.ports_on("host0")
    assert len(ports) == 1 + 4 + 1 + 4 * 9
    assert {r.ring for r in topology.replicas} == {"r", None}


def test_a_replica_over_two_hosts_has_a_process_on_each() -> None:
    engines = ServiceGroup(id="inference", config=Engine(), gpus_per_replica=8)
    base = recipe_of(ranks=8)
    topology = derive_topology(dataclasses.replace(base, groups=(engines, *base.groups[1:])), gpu_list(4, 4))
    assert [(p.name, p.host, p.gpus) for p in topology.replica("inference.0").processes] == [
        ("inference.0", "host0", (0, 1, 2, 3)), ("inference.0.rank1", "host1", (4, 5, 6, 7)),
    ]  # fmt: skip
    assert topology.replica("trainer.0").host == "host2"


def test_cpu_only_replicas_and_storage_units_go_round_the_hosts() -> None:
    writers = ServiceGroup(id="rollout", config=Writer(), replicas=5)
    base = recipe_of(queue=QueueConfig(storage_units=3))
    topology = derive_topology(dataclasses.replace(base, groups=(*base.groups[:2], writers)), gpu_list(2, 4))
    assert [r.host for r in topology.replicas_of("rollout")] == ["host0", "host1", "host0", "host1", "host0"]
    assert [s.host for s in topology.storage] == ["host0", "host1", "host0"]
    assert {p.launcher for r in topology.replicas_of("rollout") for p in r.processes} == {0, 4}


def test_capacity_is_what_the_producers_declare() -> None:
    topology = derive_topology(recipe_of(), gpu_list(1, 2))
    assert topology.contract.capacity == {"train": 256}
    assert topology.capacity_rows == 256


def test_another_base_port_moves_every_port_and_nothing_else() -> None:
    topology = derive_topology(colocated(), gpu_list(1, 4), 12000)
    moved = with_base_port(topology, 14048)
    assert moved.to_json() == derive_topology(colocated(), gpu_list(1, 4), 14048).to_json()
    assert not set(moved.ports_on("host0")) & set(topology.ports_on("host0"))


def test_the_same_inputs_give_the_same_bytes_in_another_process() -> None:
    code = (
        "from tests.core.roles import recipe_of; from meshy.topology import *;"
        "print(derive_topology(recipe_of(engines=8, ranks=8), gpu_list(2, 8)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True,
            text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert digests == {derive_topology(recipe_of(engines=8, ranks=8), gpu_list(2, 8)).digest}


def test_sixteen_thousand_gpus() -> None:
    started = time.perf_counter()
    topology = derive_topology(recipe_of(engines=8192, ranks=8192), gpu_list(2048, 8))
    assert time.perf_counter() - started < 5  # about 0.1 s; wide, since other work may share the cores
    assert len(topology.processes) == 16385
    assert len(json.dumps(topology.to_json())) > 1 << 20


def test_pure_modules_import_nothing_heavy() -> None:
    code = (
        "import sys; import meshy.topology, meshy.settings, meshy.cli;"
        "heavy = {'torch', 'zmq', 'transformers', 'numpy', 'tensordict', 'fastapi', 'httpx'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=60, deadline=None)
@given(engines=st.integers(1, 6), ranks=st.integers(1, 8), hosts=st.integers(1, 4), writers=st.integers(1, 5))
def test_no_two_processes_share_a_port_or_a_gpu(engines: int, ranks: int, hosts: int, writers: int) -> None:
    base = recipe_of(engines=engines, ranks=ranks)
    many = dataclasses.replace(
        base, groups=(*base.groups[:2], ServiceGroup(id="rollout", config=Writer(), replicas=writers))
    )
    try:
        topology = derive_topology(many, gpu_list(hosts, 4))
    except RecipeError as error:
        assert engines + ranks > 4 * hosts or any("unevenly" in fault for fault in error.faults)
        return
    claims = [(p.host, p.admin_port - 2 + offset) for p in topology.processes for offset in range(3)] + [
        (q.host, port) for q in (topology.controller, *topology.storage) for port in q.ports
    ]
    assert len(claims) == len(set(claims))
    assert all(topology.base_port < port < topology.base_port + PORT_SPAN for _, port in claims)
    gpus = [rank for replica in topology.replicas for rank in replica.gpus]
    assert len(gpus) == len(set(gpus))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faulty", "gpus", "said"),
    [
        (
            recipe_of(engines=3, ranks=2),
            gpu_list(1, 4),
            "too few GPUs: the recipe needs 5 (inference 3 x 1, trainer 1 x 2) and there are 4",
        ),
        (recipe_of(engines=1, ranks=4), gpu_list(2, 4), "trainer.0 would span hosts unevenly (3 on host0, 1 on host1)"),
        (recipe_of(), (), "the GPU list is empty"),
        (recipe_of(), (Gpu(0, "a", 0), Gpu(1, "b", 0), Gpu(2, "a", 1)), "not next to one another"),
        (recipe_of(), gpu_list(1, 30), "30 ignitors on one host"),
        (recipe_of(groups=()), gpu_list(1, 2), "no service group"),
        (recipe_of(steps=0), gpu_list(1, 2), "steps: expected at least 1, got 0"),
        (recipe_of(learner=Learner(lr=-1.0)), gpu_list(1, 2), "trainer.lr: expected more than 0"),
        (recipe_of(sampling=Sampling(temperature=0.0)), gpu_list(1, 2), "sampling.temperature: expected more than 0"),
        (recipe_of(sampling=Sampling(max_new_tokens=4096)), gpu_list(1, 2), "less than context_length (1024)"),
        (recipe_of(ServiceGroup(id="rollout", config=Scorer())), gpu_list(1, 2), "group id 'rollout' is used 2 times"),
        (recipe_of(ServiceGroup(id="steps", config=Scorer())), gpu_list(1, 2), "'steps' is also a run-wide field"),
        (recipe_of(ServiceGroup(id="a-b", config=Scorer())), gpu_list(1, 2), "use up to 64 letters, digits and '_'"),
        (
            recipe_of(ServiceGroup(id="s", config=Scorer(), replicas=0)),
            gpu_list(1, 2),
            "s.replicas: expected 1 to",
        ),
        (
            recipe_of(ServiceGroup(id="s", config=Learner(end=False))),
            gpu_list(1, 2),
            "one process a GPU and needs at least 1",
        ),
        (
            recipe_of(ServiceGroup(id="s", config=Scorer(), wait_for=("rolout",))),
            gpu_list(1, 2),
            "(did you mean 'rollout'?)",
        ),
        (
            recipe_of(ServiceGroup(id="s", config=Scorer(), wait_for=("s",))),
            gpu_list(1, 2),
            "s.wait_for: it names itself",
        ),
    ],
)
def test_a_recipe_that_cannot_be_placed_is_refused(faulty: Recipe, gpus: tuple[Gpu, ...], said: str) -> None:
    assert any(said in fault for fault in faults_of(faulty, gpus)), faults_of(faulty, gpus)


def test_a_circle_in_wait_for_is_refused() -> None:
    base = recipe_of()
    inference = dataclasses.replace(base.groups[0], wait_for=("trainer",))
    faults = faults_of(dataclasses.replace(base, groups=(inference, *base.groups[1:])))
    assert "wait_for goes round in a circle among inference, trainer" in faults[0]


def ring(*members: tuple[str, str], id: str = "r") -> ColocationRing:
    return ColocationRing(id=id, members=members)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rings", "said"),
    [
        ((ring(("inference", ON_DEMAND), ("trainer", ON_DEMAND)),), "ring 'r' has no FALLBACK member"),
        ((ring(("inference", FALLBACK), ("trainer", FALLBACK)),), "ring 'r' has several FALLBACK members"),
        ((ring(("inference", FALLBACK), ("trainer", ON_DEMAND), id="a/b"),), "ring id 'a/b': use up to 64 letters"),
        ((ring(("inference", FALLBACK), ("trainer", ON_DEMAND), id=300 * "a"),), "use up to 64 letters"),
        ((ring(("inference", ON_DEMAND), ("trainer", FALLBACK)),), "'inference' answers requests at any time"),
        ((ring(("inference", FALLBACK)),), "ring 'r' has 1 member"),
        ((ring(("inference", FALLBACK), ("inference", ON_DEMAND)),), "ring 'r' names group 'inference' twice"),
        ((ring(("inference", FALLBACK), ("teacher", ON_DEMAND)),), "names group 'teacher', which is not in the recipe"),
        ((ring(("inference", FALLBACK), ("rollout", ON_DEMAND)),), "'rollout' uses no GPU"),
        ((), "'trainer' shares the GPUs of 'inference' but is in no ring"),
        (
            (
                ring(("inference", FALLBACK), ("trainer", ON_DEMAND)),
                ring(("inference", FALLBACK), ("trainer", ON_DEMAND), id="q"),
            ),
            "group 'inference' is in two rings, 'r' and 'q'",
        ),
        ((ring(("inference", FALLBACK), ("trainer", ON_DEMAND)),) * 2, "ring id 'r' is used twice"),
    ],
)
def test_a_ring_that_does_not_hold_is_refused(rings: tuple[ColocationRing, ...], said: str) -> None:
    faults = faults_of(colocated(rings=rings), gpu_list(1, 4))
    assert any(said in fault for fault in faults), faults


def test_the_fallback_member_does_not_wait_for_its_ring() -> None:
    recipe = colocated()
    waiting = dataclasses.replace(recipe.group("inference"), wait_for=("trainer",))
    faults = faults_of(dataclasses.replace(recipe, groups=(waiting, *recipe.groups[1:])), gpu_list(1, 4))
    assert any("'inference', which holds the GPUs while nobody asks, waits for 'trainer'" in fault for fault in faults)


def test_groups_do_not_share_gpus_in_a_circle() -> None:
    recipe = colocated()
    inference = dataclasses.replace(recipe.groups[0], colocate_with="trainer")
    faults = faults_of(dataclasses.replace(recipe, groups=(inference, *recipe.groups[1:])), gpu_list(1, 4))
    assert faults == [
        "colocate_with goes round in a circle among inference, trainer; let one of them have GPUs of its own"
    ]


def test_a_ring_that_is_refused_adds_no_faults_of_its_ledger() -> None:
    faults = faults_of(colocated(rings=(ring(("inference", FALLBACK), ("trainer", ON_DEMAND)),) * 2), gpu_list(1, 4))
    assert not any("colocate.r" in fault for fault in faults), faults


def test_nor_by_way_of_others() -> None:
    recipe = colocated()
    inference, trainer, rollout = recipe.groups
    groups = (
        dataclasses.replace(inference, wait_for=("rollout",)),
        trainer,
        dataclasses.replace(rollout, wait_for=("trainer",)),
    )
    faults = faults_of(dataclasses.replace(recipe, groups=groups), gpu_list(1, 4))
    assert any("waits for 'trainer' of the same ring, itself or by others" in fault for fault in faults), faults


def test_a_replica_over_several_hosts_is_refused_in_a_ring() -> None:
    recipe = colocated()
    wide = dataclasses.replace(recipe.groups[0], replicas=1, gpus_per_replica=4)
    faults = faults_of(dataclasses.replace(recipe, groups=(wide, *recipe.groups[1:])), gpu_list(2, 2))
    assert any("a replica of 'inference' spans several hosts" in fault for fault in faults), faults


def test_ring_members_must_share_exactly_their_gpus() -> None:
    apart = recipe_of(engines=2, ranks=2, rings=(ring(("inference", FALLBACK), ("trainer", ON_DEMAND)),))
    assert "members must share exactly the same GPUs" in faults_of(apart, gpu_list(1, 4))[0]
    base = colocated()
    small = dataclasses.replace(base.groups[1], gpus_per_replica=2)
    faults = faults_of(dataclasses.replace(base, groups=(base.groups[0], small, base.groups[2])), gpu_list(1, 4))
    assert "1 x 2 GPUs do not cover exactly the 4 GPUs of 'inference'" in faults[0]


def test_more_services_than_ports_are_refused() -> None:
    base = recipe_of()
    many = dataclasses.replace(
        base, groups=(*base.groups[:2], ServiceGroup(id="rollout", config=Writer(), replicas=400))
    )
    assert any("would be taken by both" in fault for fault in faults_of(many))


def test_faults_of_the_column_contract_are_the_topologys() -> None:
    faults = faults_of(recipe_of(learner=Learner(also=("scroe",))))
    assert faults == [
        "'trainer' consumes train.scroe, which nothing produces; it would wait for ever: add the role that writes it, "
        "or drop the column"
    ]
