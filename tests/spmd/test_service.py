"""Two ranks of an SPMD role as a real run: how they work together, and how one takes the other with it."""

from pathlib import Path

import pytest

from tests.launch import launched

pytestmark = pytest.mark.e2e

ROLES = "tests/spmd/roles.py"


@pytest.mark.prove
def test_ranks_execute_what_the_leader_commands_and_end_together(tmp_path: Path):
    with launched(tmp_path / "run", recipe=ROLES, slots=2) as run:
        assert run.wait() == 0, run.output
        assert run.left_after(10) == []
    assert (run.run_dir / "sums.txt").read_text() == "{3.0}"


def test_a_rank_that_raises_takes_the_replica_down_with_its_own_traceback(tmp_path: Path):
    with launched(tmp_path / "run", "--after", "fail", recipe=ROLES, slots=2) as run:
        assert run.wait() != 0
        assert run.left_after(10) == []
    assert "ValueError: rank 1 cannot go on" in run.output
    leader = (run.run_dir / "logs" / "adder.0.log").read_text()
    assert "rank 1 failed: Traceback" in leader and "ValueError: rank 1 cannot go on" in leader


@pytest.mark.prove
def test_killing_a_rank_ends_the_others(tmp_path: Path):
    with launched(tmp_path / "run", "--after", "stay", recipe=ROLES, slots=2) as run:
        run.wait_for_line("all services ready")
        log = run.run_dir / "logs" / "adder.0.log"
        run.service("adder.0.rank1").kill()
        assert run.wait(15) != 0
        assert run.left_after(10) == []
    assert "adder.0" in run.output and "rank 1 is gone" in log.read_text()
