import os
import subprocess
import sys
import textwrap

import pytest

from meshy.observe.logs import last_traceback


def run(tmp_path, code, **environment):
    """Runs `code` as a service process does, with its output in a log; gives the log and the exit status."""
    path = tmp_path / "service.log"
    with path.open("wb") as log:
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            timeout=60,
        )
    return path, process.returncode


def test_one_format_with_service_time_and_level(tmp_path):
    code = """
        import logging, warnings
        from meshy.observe.logs import setup_logging
        setup_logging("trainer.0/1")
        setup_logging("trainer.0/1")
        logging.getLogger("meshy.x").info("hello")
        logging.getLogger("meshy.x").debug("hidden")
        logging.getLogger("httpx").info("hidden")
        warnings.warn("careful")
    """
    path, _ = run(tmp_path, code)
    text = path.read_text()
    assert "hidden" not in text and text.count("hello") == 1
    assert " INFO    trainer.0/1 meshy.x: hello" in text.splitlines()[0]
    assert "careful" in text and "WARNING trainer.0/1 py.warnings" in text
    assert "hidden" in run(tmp_path, code, MESHY_LOG_LEVEL="debug")[0].read_text()
    path, status = run(tmp_path, code, MESHY_LOG_LEVEL="loud")
    assert status == 1 and "'LOUD' is not a log level; choose one of DEBUG" in path.read_text()


def test_a_chain_with_a_message_of_many_lines(tmp_path):
    path, _ = run(
        tmp_path,
        """
        import logging, atexit
        from meshy.observe.logs import setup_logging
        setup_logging("trainer.0")
        try:
            {}["harmless"]
        except KeyError:
            logging.exception("caught and logged")
        logging.info("going on")
        def inner(): raise ValueError("the root\\n\\n  of it all")
        def outer():
            try: inner()
            except ValueError as error: raise RuntimeError("outside\\nsecond line") from error
        try: outer()
        except RuntimeError: int("x")
        """,
    )
    found = last_traceback(path)
    assert found.startswith("Traceback") and "harmless" not in found and "going on" not in found
    for part in (
        "in inner",
        "ValueError: the root\n\n  of it all",
        "direct cause",
        "outside\nsecond line",
        "During handling",
    ):
        assert part in found
    assert found.endswith("ValueError: invalid literal for int() with base 10: 'x'")


def test_what_came_after_the_traceback_is_told_apart(tmp_path):
    path, _ = run(
        tmp_path,
        """
        import logging
        from meshy.observe.logs import setup_logging
        setup_logging("trainer.0")
        try: {}["old"]
        except KeyError: logging.exception("caught")
        for i in range(40): logging.info("line %d", i)
        """,
    )
    found = last_traceback(path)
    assert "KeyError: 'old'\n\n(the log goes on for 40 more lines; the end of it:)" in found
    assert "line 39" in found and "line 34" not in found


def test_group_and_thread_and_fatal_signal(tmp_path):
    group = """
        import asyncio
        async def bad(): raise ValueError("in a task")
        async def main():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bad())
                tasks.create_task(bad())
        asyncio.run(main())
    """
    found = last_traceback(run(tmp_path, group)[0])
    assert found.startswith("  + Exception Group Traceback") and found.count("ValueError: in a task") == 2
    thread = """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
    """
    found = last_traceback(run(tmp_path, thread)[0])
    assert found.endswith("ZeroDivisionError: division by zero")
    crash = """
        import ctypes
        from meshy.observe.logs import setup_logging
        setup_logging("inference.0")
        try: 1 / 0
        except ZeroDivisionError: import traceback; traceback.print_exc()
        ctypes.string_at(0)
    """
    path, status = run(tmp_path, crash)
    found = last_traceback(path)
    assert status == -11 and found.startswith("Fatal Python error: Segmentation fault") and "string_at" in found


def test_lines_that_carry_a_rank(tmp_path):
    """PyTorch prefixes the traceback of an uncaught error with its rank once a process group exists."""
    (tmp_path / "r.log").write_text(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1, in f\n'
        "[rank1]: ValueError: root\n"
        "[rank1]: \n"
        "[rank1]: During handling of the above exception, another exception occurred:\n"
        "[rank1]: \n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 2, in g\n'
        "[rank1]:     g()\n"
        "[rank1]: RuntimeError: two\n"
        "[rank1]: lines\n"
        "[rank1]:[W1130 03:47:00.1 ProcessGroupGloo.cpp:1] Warning: not destroyed\n"
    )
    found = last_traceback(tmp_path / "r.log")
    first = found.split("\n\n(the log goes on")[0]
    assert first.startswith("[rank1]: Traceback") and "ValueError: root" in first
    assert first.endswith("[rank1]: RuntimeError: two\n[rank1]: lines")


def test_without_a_traceback(tmp_path):
    assert last_traceback(tmp_path / "none.log") is None
    (tmp_path / "empty.log").write_text("")
    assert last_traceback(tmp_path / "empty.log") is None
    (tmp_path / "plain.log").write_text("".join(f"line {i}\n" for i in range(100)))
    assert last_traceback(tmp_path / "plain.log").splitlines() == [f"line {i}" for i in range(80, 100)]


@pytest.mark.parametrize("size", [3_000_000])
def test_a_huge_log_is_read_from_its_end(tmp_path, size):
    with (tmp_path / "huge.log").open("w") as log:
        log.write("é" * 79 + "\n")
        for _ in range(size // 80):
            log.write("x" * 79 + "\n")
        log.write("Traceback (most recent call last):\n  File 'a'\nValueError: end\n")
    assert last_traceback(tmp_path / "huge.log").splitlines()[-1] == "ValueError: end"
