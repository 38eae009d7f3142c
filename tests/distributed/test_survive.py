"""Runs that are killed at random points end with the weights of one that nothing disturbed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.survive import ROOT


def survivors(points, seed):
    """What the command prints, in a process of its own: a fork server must begin without threads."""
    words = ["tests/survive.py", "--points", str(points), "--seed", str(seed)]
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60 * points + 200
    )
    return result.returncode, result.stdout + result.stderr


def test_six_runs_that_are_disturbed_end_with_the_same_bits():
    status, told = survivors(6, 1)
    assert status == 0 and "6 of 6 runs went on" in told, told


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_runs_that_are_disturbed_end_with_the_same_bits():
    status, told = survivors(50, 0)
    assert status == 0 and "50 of 50 runs went on" in told, told
