import json
import os
import subprocess
import sys
import threading
import time

import pytest

from meshy.observe.timeline import Timeline, covered, idle_share, read_timeline, steady_window, union


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_union_and_covered():
    assert union([(5, 6), (1, 2), (1.5, 3), (3, 4)]) == [(1, 4), (5, 6)]
    assert union([(0, 10), (2, 3)]) == [(0, 10)]
    assert union([(0, 1), (1.5, 2)], gap=0.5) == [(0, 2)]
    assert union([]) == []
    assert covered([(0, 4), (3, 5), (8, 20)], 1, 10) == 6
    assert covered([(0, 1)], 2, 3) == 0


def test_idle_share_is_the_complement_of_the_union_over_services(tmp_path):
    for service, name, start, end in [
        ("inference.0", "decode", 0, 4),
        ("rollout.0", "reward", 3, 5),
        ("trainer.0", "train", 6, 9),
        ("trainer.0", "publish", 5, 6),  # not the work of an engine
    ]:
        timeline = Timeline(tmp_path / "timeline" / f"{service}.jsonl")
        timeline.record(name, start, end)
        timeline.close()
    assert idle_share(tmp_path, 0, 10) == pytest.approx(0.2)
    assert idle_share(tmp_path, 5, 6) == 1.0
    assert idle_share(tmp_path, 1, 5) == 0.0
    with pytest.raises(ValueError, match="longer than nothing"):
        idle_share(tmp_path, 3, 3)


def test_decode_steps_in_a_row_become_one_line(tmp_path):
    timeline = Timeline(tmp_path / "i.jsonl")
    for step in range(5000):
        timeline.record("decode", 100 + step * 0.002, 100 + step * 0.002 + 0.0015)
    timeline.record("decode", 200, 201)
    timeline.record("prefill", 100, 101)
    timeline.close()
    rows = lines(tmp_path / "i.jsonl")
    decode = [(row["start"], row["end"]) for row in rows if row["name"] == "decode"]
    assert len(rows) <= 6 and decode[-1] == (200, 201)  # a flush in between may cut one run in two
    assert union(decode, gap=0.001)[0] == (100, pytest.approx(109.9995))


def test_concurrent_spans_that_end_out_of_order_lose_nothing(tmp_path):
    timeline = Timeline(tmp_path / "r.jsonl")
    timeline.record("reward", 5, 6)
    timeline.record("reward", 1, 2)
    timeline.record("reward", 0.5, 5.5)
    timeline.close()
    assert union(read_timeline(tmp_path)) == [(0.5, 6)]


def test_span_from_many_threads_and_on_error(tmp_path):
    timeline = Timeline(tmp_path / "t.jsonl")
    before = time.time()

    def work(index):
        for _ in range(50):
            with timeline.span(f"name{index}"):
                pass

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with pytest.raises(RuntimeError), timeline.span("failed"):
        raise RuntimeError
    timeline.close()
    rows = lines(tmp_path / "t.jsonl")
    assert {row["name"] for row in rows} == {f"name{index}" for index in range(8)} | {"failed"}
    assert all(before - 0.01 <= row["start"] <= row["end"] <= time.time() for row in rows)


def test_written_while_running_and_after_close(tmp_path):
    timeline = Timeline(tmp_path / "t.jsonl")
    timeline.record("train", 1, 2)
    deadline = time.monotonic() + 10
    while not (tmp_path / "t.jsonl").exists():
        assert time.monotonic() < deadline, "the regular flush never came"
        time.sleep(0.05)
    timeline.close()
    timeline.close()
    timeline.record("train", 3, 4)
    assert [row["start"] for row in lines(tmp_path / "t.jsonl")] == [1, 3]


def test_a_process_that_ends_without_close_still_writes(tmp_path):
    code = "import sys; from meshy.observe.timeline import Timeline; Timeline(sys.argv[1]).record('train', 1, 2)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.jsonl")], check=True, timeout=60)
    assert lines(tmp_path / "t.jsonl") == [{"name": "train", "start": 1, "end": 2}]


def test_an_interval_is_an_instant_where_the_clock_was_set_back(tmp_path):
    timeline = Timeline(tmp_path / "t.jsonl")
    timeline.record("train", 2, 1)
    timeline.close()
    assert lines(tmp_path / "t.jsonl") == [{"name": "train", "start": 2, "end": 2}]


def test_steady_window():
    clocked = [{"started": 10 * i, "ended": 10 * i + 8, "step_seconds": 8} for i in range(5)]
    assert steady_window(clocked) == (10, 38)
    assert steady_window(clocked[:2]) is None
    bare = [{"step_seconds": 2.0} for _ in range(5)]
    assert steady_window(bare, last_end=100) == (92, 98)
    assert steady_window(bare) is None


def test_torch_free():
    code = (
        "import sys, meshy.observe.timeline, meshy.observe.runfolder;"
        "heavy = {'torch', 'matplotlib', 'rich', 'httpx', 'numpy', 'zmq', 'ray'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})
