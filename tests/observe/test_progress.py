import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from meshy.observe.progress import RunView, evaluation_line
from meshy.observe.terminal import duration, short

RUN = """
    import sys, time
    from meshy.observe.progress import Progress
    from meshy.observe.jsonl import JsonlWriter
    from meshy.observe.runfolder import RunFolder
    folder = RunFolder.create("x", run_dir=sys.argv[1])
    metrics, evals = JsonlWriter(folder.metrics), JsonlWriter(folder.evals)
    with Progress(folder, steps=3, depth=lambda: "64 rows") as progress:
        progress.state("inference.0", "starting"); progress.state("trainer.0", "starting")
        time.sleep(0.1)
        progress.state("inference.0", "ready"); progress.state("trainer.0", "ready")
        progress.note("[bold]a note[/bold]")
        evals.write({"weight_version": 0, "accuracy": 0.5, "count": 8, "seconds": 1})
        for step in range(1, 4):
            time.sleep(0.1)
            metrics.write({"step": step, "reward_mean": step / 4, "step_seconds": 2.0, "tokens_per_second": 12345.0})
        evals.write({"weight_version": 3, "accuracy": 0.75, "count": 8, "seconds": 1})
        HOOK
    print("the run has ended", file=sys.stderr)
"""
ENDED = "the run has ended"


def command(tmp_path, hook="pass"):
    return [sys.executable, "-c", textwrap.dedent(RUN).replace("HOOK", hook), str(tmp_path / "run")]


def on_terminal(arguments, until=None, seconds=30, **environment):
    """Runs a process on a pseudo-terminal; kills it once `until` is written. Gives its output and exit status."""
    main, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment}
    process = subprocess.Popen(arguments, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    text = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not select.select([main], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        text += data
        if not data:
            break
        if until is not None and until in text:
            process.send_signal(signal.SIGKILL)
            until = None
    os.close(main)
    return text.decode(), process.wait(10)


def screen(text):
    """What a terminal shows after `text`: lines, with the cursor's moves and erasures done."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.", text, re.DOTALL):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_the_view_says_who_is_awaited():
    view = RunView(steps=10, started=100)
    assert view.start_line(100) == "starting: ..."
    for name in ("queue", "inference.0", "inference.1", "trainer.0"):
        view.set_state(name, "starting", 100)
    view.set_state("queue", "ready", 102)
    assert view.set_state("inference.1", "ready", 104) and not view.set_state("inference.1", "ready", 105)
    line = view.start_line(108)
    assert line == "starting: queue ready, inference 1/2 ready (8 s), trainer starting (8 s)"
    for name in ("inference.0", "trainer.0"):
        view.set_state(name, "ready", 110)
    assert view.start_line(113) == "all services ready after 10 s; waiting for the first step (3 s)"


def test_the_view_of_steps():
    view = RunView(steps=20, started=0)
    assert view.eta() is None
    for step in range(1, 16):
        view.add_step({"step": step, "reward_mean": step / 100, "step_seconds": 2, "staleness_max": 0}, now=step)
    assert view.eta() == 10
    assert view.step_line() == "step 15/20  reward 0.150 (avg 0.105)  length -  staleness 0  2 s/step  - tok/s"
    view.add_step({"step": 20, "reward_mean": None, "step_seconds": 2}, now=20)
    assert view.eta() is None and "reward - (avg 0.110)" in view.step_line()
    assert "accuracy - on ? prompts" in evaluation_line({"weight_version": 1, "accuracy": None})


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0.1234, "0.123"), (41.27, "41.3"), (8234.5, "8234"), (12345.0, "12.3k"), (-0.5, "-0.500"), (3, "3")],
)
def test_short_numbers(number, text):
    assert short(number) == text


def test_durations():
    assert [duration(seconds) for seconds in (0.4, 59.6, 65, 7389)] == ["0 s", "1:00", "1:05", "2:03:09"]


def test_a_pipe_gets_plain_lines(tmp_path):
    environment = {**os.environ, "FORCE_COLOR": "1"}
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == f"run folder  {tmp_path / 'run'}" and f"meshy status {tmp_path / 'run'} --watch" in lines[1]
    assert "starting: inference starting (0 s), trainer starting (0 s)" in lines
    assert "[bold]a note[/bold]" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert [step.split()[1] for step in steps] == ["1/3", "2/3", "3/3"]
    assert steps[0].endswith("12.3k tok/s  queue 64 rows  ETA 4 s")
    assert lines[-1].startswith("evaluation of weights v3: accuracy 75.0 % on 8 prompts")


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("run folder")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 0 and errors == "the run has ended\n"


def test_a_terminal_gets_a_live_block(tmp_path):
    text, status = on_terminal(command(tmp_path))
    assert status == 0, text
    assert "starting: inference starting" in text
    left = [line for line in screen(text) if line]
    assert left[0].startswith("run folder") and left[2] == "[bold]a note[/bold]"
    assert [line.split()[4] for line in left[3:5]] == ["accuracy"] * 2
    assert re.fullmatch(r"step 3/3  ━+  \d s elapsed", left[5])
    assert left[6:] == ["reward 0.750 (avg 0.500)  length -  staleness -  2 s/step  12.3k tok/s  queue 64 rows", ENDED]


def test_what_others_print_meanwhile_stays_on_the_screen(tmp_path):
    hook = """logging.warning("logged"); print("printed\\nTraceback", file=sys.stderr); time.sleep(1.2)"""
    code = command(tmp_path, hook)
    code[2] = "import logging; logging.basicConfig()" + code[2]
    text, status = on_terminal(code)
    left = [line for line in screen(text) if line]
    assert status == 0 and {"WARNING:root:logged", "printed", "Traceback"} < set(left)
    assert sum(line.startswith("step ") for line in left) == 1


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    text, status = on_terminal(command(tmp_path), TERM="dumb")
    assert status == 0 and "\x1b[2K" not in text and text.count("step 3/3") == 1


def test_a_kill_leaves_the_cursor_visible(tmp_path):
    text, status = on_terminal(command(tmp_path, hook="time.sleep(60)"), until=b"3/3")
    assert status == -signal.SIGKILL
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")


def test_a_terminal_that_hangs_does_not_hold_up_the_run(tmp_path):
    read, write = os.pipe()  # never read from, and filled: a write to it blocks
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    process = subprocess.Popen(command(tmp_path), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.stderr.readline() == "the run has ended\n"
    os.close(read)
    process.stderr.read()
    process.wait(30)
