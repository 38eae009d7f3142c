"""Error messages for killed ranks say whether the kernel killed them because memory ran out."""

from __future__ import annotations

import pytest

from burst_attention.launch.memory import kills_for_memory, why_killed

RAN_OUT = "memory ran out, and the kernel ended it"
PERHAPS = "which the system sends when memory runs out"


def system(root, *, groups, files):
    """Write the relevant files of a system under ``root``."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/user.slice/run\n", "sys/fs/cgroup/user.slice/run/memory.events", "low 0\noom 9\noom_kill {}\n"),
        ("4:memory:/box\n0::/\n", "sys/fs/cgroup/memory/box/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("4:cpu,memory:/box\n", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill {}\n"),
        ("0::/\n", "proc/vmstat", "nr_free_pages 7\noom_kill {}\n"),
    ],
    ids=["version 2", "version 1", "version 1, in a container", "the machine"],
)
def test_a_count_that_grew_tells_that_memory_ran_out(tmp_path, groups, file, text):
    system(tmp_path, groups=groups, files={file: text.format(2)})
    before = kills_for_memory(tmp_path)
    assert list(before.values()) == [2]
    assert why_killed(before, tmp_path) == PERHAPS
    system(tmp_path, groups=groups, files={file: text.format(3)})
    assert why_killed(before, tmp_path).startswith(RAN_OUT)


def test_where_nothing_counts_nothing_is_claimed(tmp_path):
    assert kills_for_memory(tmp_path) == {} and why_killed({}, tmp_path) == PERHAPS
    system(tmp_path, groups="0::/\n", files={"proc/vmstat": "oom_kill 5\n"})
    assert why_killed({}, tmp_path) == PERHAPS, "what was there before is not known"
