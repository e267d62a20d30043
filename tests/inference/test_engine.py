"""Pausing, updating, aborting, releasing: what happens to requests on their way."""

from __future__ import annotations

import threading

import pytest
import torch

from meshy.inference.embedded.engine import EngineFailure, WeightUpdate
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.weights import WeightError
from tests.inference.conftest import request
from tests.inference.test_parity import check, logprobs_of, reference

LONG = 200


@pytest.fixture
def bench(folder, new_bench):
    return new_bench(folder)


def started(bench, action, rid: str = "long"):
    """A long request, and what `action(engine)` gave when it had written 3 tokens."""
    one = request(rid, [1, 2, 3], LONG, seed=5)
    return one, bench.submit_and([one], 3, action)


def update(folder, version: str, **options) -> WeightUpdate:
    return WeightUpdate(folder=folder, version=version, **options)


def test_pause_abort_ends_what_runs_and_holds_what_comes(bench):
    one, paused = started(bench, lambda engine: engine.pause("abort"))
    paused.result(10)
    assert one.finish_reason["type"] == "abort" and one.finish_reason["message"] == "Aborted"
    assert 0 < len(one.output) < LONG and one.spans == [["0", 0, len(one.output)]]
    (late,) = bench.submit([request("late", [4], 3)])
    assert bench.engine.flush().result(10) and bench.engine.call(bench.engine.occupancy).result(10)[:3] == (0, 0, 1)
    assert not late.output
    bench.engine.resume().result(10)
    bench.wait([late])


def test_retract_across_an_update_goes_on_with_the_new_weights(bench, folder, model_folders):
    one, paused = started(bench, lambda engine: engine.pause("retract"))
    paused.result(10)
    cut = len(one.output)
    assert bench.engine.flush().result(10)
    assert bench.engine.update_weights(update(model_folders["other"], "1")).result(10) == "1"
    bench.engine.resume().result(10)
    bench.wait([one])
    assert one.spans == [["0", 0, cut], ["1", cut, LONG]] and one.retractions == 1 and len(one.output) == LONG
    # Each part was written by the model that its span names, from the whole prefix.
    for source, part in ((folder, slice(0, cut)), (model_folders["other"], slice(cut, LONG))):
        rows = logprobs_of(reference(source), one.tokens)[len(one.prompt) - 1 :]
        expected = rows.gather(1, torch.tensor(one.output)[:, None])[part, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs[part]), expected, atol=1e-5, rtol=0)


def test_retract_without_an_update_changes_nothing(bench, folder):
    (expected,) = bench.run([request("undisturbed", [1, 2, 3], LONG, seed=5)])
    one, paused = started(bench, lambda engine: engine.pause("retract"))
    paused.result(10)
    bench.engine.resume()
    bench.engine.pause("retract")
    bench.engine.resume()
    bench.wait([one])
    assert one.output == expected.output and one.spans == [["0", 0, LONG]]
    check(reference(folder), one)


def test_in_place_keeps_keys_and_refuses_a_flush(bench, model_folders):
    one, paused = started(bench, lambda engine: engine.pause("in_place"))
    paused.result(10)
    assert not bench.engine.flush().result(10)
    before = bench.engine.call(bench.engine.runner.checksums).result(10)
    with pytest.raises(RequestError, match="cache cannot be flushed"):
        bench.engine.update_weights(update(model_folders["other"], "1")).result(10)
    assert bench.engine.call(bench.engine.runner.checksums).result(10) == before
    bench.engine.update_weights(update(model_folders["other"], "1", flush_cache=False)).result(10)
    bench.engine.resume().result(10)
    bench.wait([one])
    assert [version for version, *_ in one.spans] == ["0", "1"] and one.retractions == 0
    assert one.spans[0][2] == one.spans[1][1] and one.spans[1][2] == LONG


def test_an_update_waits_for_what_runs_and_holds_back_what_comes(bench, model_folders):
    late = request("late", [4], 3)

    def action(engine):
        loaded = engine.update_weights(update(model_folders["other"], "1"))
        bench.submit([late])
        return loaded

    one, loaded = started(bench, action)
    assert loaded.result(30) == "1"
    bench.wait([one, late])
    assert one.spans == [["0", 0, LONG]] and late.spans == [["1", 0, 3]]


def test_an_update_that_aborts_does_not_wait(bench, model_folders):
    new = update(model_folders["other"], "1", abort_all=True)
    one, loaded = started(bench, lambda engine: engine.update_weights(new))
    assert loaded.result(10) == "1"
    assert one.finish_reason["type"] == "abort" and one.spans == [["0", 0, len(one.output)]]


def test_a_pause_lets_a_waiting_update_through(bench, model_folders):
    new = update(model_folders["other"], "1")
    one, (loaded, _) = started(bench, lambda engine: (engine.update_weights(new), engine.pause("retract")))
    assert loaded.result(10) == "1"
    bench.engine.resume().result(10)
    bench.wait([one])
    assert [version for version, *_ in one.spans] == ["0", "1"] and len(one.output) == LONG


def test_bad_weights_leave_the_old_ones(bench, folder, model_folders, tmp_path):
    before = bench.engine.call(bench.engine.runner.checksums).result(10)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not a header}")
    for source, message in [
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, "holds no"),
        (tmp_path / "broken", "Cannot load weights"),
        (model_folders["llama_full_untied"], "is of another model|has shape"),
    ]:
        with pytest.raises(WeightError, match=message):
            bench.engine.update_weights(update(source, "9")).result(10)
    assert bench.engine.call(bench.engine.runner.checksums).result(10) == before
    (done,) = bench.run([request("after", [1, 2, 3], 5)])
    assert done.spans == [["0", 0, 5]]
    check(reference(folder), done)


def test_aborts_reach_running_waiting_and_held_requests(bench):
    running = [request(f"r{i}", [1, 2, 3], LONG) for i in range(8)]
    waiting = [request("w", [1], 5), request("x", [1], 5)]
    bench.ended.update((one.rid, threading.Event()) for one in waiting)

    def action(engine):
        """Eight run in the eight slots; two more come and wait; then two are aborted and the rest is paused."""
        engine.submit(waiting)
        return engine.abort({"r3", "w", "unknown"}), engine.pause("retract")

    aborted, paused = bench.submit_and(running, 3, action)
    assert aborted.result(10) == 2
    paused.result(10)
    bench.wait([running[3], waiting[0]])
    assert running[3].finish_reason["message"] == "Aborted" and 0 < len(running[3].output) < LONG
    assert waiting[0].finish_reason == {"type": "abort", "message": "Abort in waiting queue"} and not waiting[0].output
    held = bench.submit([request("h", [1], 5)])
    assert bench.engine.abort(None).result(10) == 9
    bench.wait([*running, *waiting, *held])
    bench.engine.resume().result(10)
    bench.run([request("after", [1], 5)])


def test_released_memory_comes_back_bit_for_bit(bench, folder):
    runner = bench.engine.runner
    before = bench.engine.call(runner.checksums).result(10)
    bench.run([request("fill", [1] * 40, 5)])
    one, (refused, paused) = started(bench, lambda engine: (engine.release({"weights"}), engine.pause("retract")))
    with pytest.raises(RequestError, match="while requests are running"):
        refused.result(10)
    paused.result(10)
    bench.engine.release({"weights", "kv_cache"}).result(10)
    assert runner.weights.bytes == 0 and runner.cache.bytes == 0
    bench.engine.resume().result(10)  # it still cannot run
    assert not bench.ended[one.rid].is_set()
    bench.engine.call(lambda: runner.resume({"weights"})).result(10)
    assert bench.engine.call(runner.checksums).result(10) == before
    bench.engine.call(lambda: runner.resume({"kv_cache"})).result(10)
    bench.wait([one])
    check(reference(folder), one)


def test_tied_weights_stay_tied_through_release_and_update(model_folders, new_bench, tmp_path):
    source = model_folders["qwen3_full_tied"]
    bench = new_bench(source)
    runner = bench.engine.runner
    before = bench.engine.call(runner.checksums).result(10)
    bench.engine.release({"weights"}).result(10)
    bench.engine.call(lambda: runner.resume({"weights"})).result(10)
    bench.engine.update_weights(update(source, "1")).result(10)
    assert bench.engine.call(runner.checksums).result(10) == before and "lm_head.weight" not in before
    model = runner.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    (done,) = bench.run([request("after", [1, 2, 3], 5)])
    check(reference(source), done)


def test_an_update_while_released_brings_the_new_weights(bench, model_folders):
    bench.engine.release({"weights"}).result(10)
    bench.engine.update_weights(update(model_folders["other"], "1")).result(10)
    (done,) = bench.run([request("after", [1, 2, 3], 5)])
    check(reference(model_folders["other"]), done)


def test_busy_intervals_cover_the_work_and_nothing_else(bench):
    bench.run([request("a", [1], 50)])
    bench.engine.flush().result(10)
    bench.run([request("b", [1], 50)])
    bench.engine.close()
    assert len(bench.busy) >= 2 and all(start < end for start, end in bench.busy)
    assert bench.busy[0][1] <= bench.busy[1][0]
    total = sum(end - start for start, end in bench.busy)
    assert bench.engine.counters.busy_seconds <= total + 1e-3
    assert bench.engine.counters.generated_tokens == 100


def test_a_dying_engine_leaves_no_one_waiting(bench):
    one, paused = started(bench, lambda engine: engine.pause("in_place"))
    paused.result(10)
    (held,) = bench.submit([request("held", [1], 5)])

    def explode(*_):
        raise MemoryError("no more")

    bench.engine.runner.forward = explode
    bench.engine.resume().result(10)
    bench.wait([one, held])
    assert one.finish_reason["status_code"] == held.finish_reason["status_code"] == 500
    assert isinstance(bench.engine.failure, MemoryError)
    with pytest.raises(EngineFailure):
        bench.engine.submit([request("late", [1], 5)])
    with pytest.raises(EngineFailure):
        bench.engine.flush()


def test_the_cache_grows_only_as_far_as_it_is_used(bench):
    bench.run([request("short", [1] * 10, 5)])
    assert bench.engine.runner.cache.length == 32
    bench.run([request("longer", [1] * 90, 5)])
    assert bench.engine.runner.cache.length == 96
    bench.run([request("longest", [1] * 200, 56)])
    assert bench.engine.runner.cache.length == 256
