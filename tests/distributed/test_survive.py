"""Runs that are killed at random points end with the weights of one that nothing disturbed."""

import subprocess
import sys

import pytest

from tests.tools.survive import ROOT


def survivors(points, seed, *worlds):
    """Run the command in a separate process and return its output: a fork server must start without threads."""
    words = ["tests/tools/survive.py", "--points", str(points), "--seed", str(seed), "--worlds", *worlds]
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60 * points + 200
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_runs_that_are_disturbed_four_times_end_with_the_same_bits():
    status, reported = survivors(4, 0, "2")
    assert status == 0 and "4 of 4 disturbances left the weights" in reported, reported


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_disturbed_fifty_times_end_with_the_same_bits():
    status, reported = survivors(50, 0, "2", "3")
    assert status == 0 and "50 of 50 disturbances left the weights" in reported, reported
