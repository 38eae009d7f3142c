"""Whether the kernel ended a process because memory ran out: it counts those that it did."""

from __future__ import annotations

from pathlib import Path


def kills_for_memory(root: Path = Path("/")) -> dict[str, int]:
    """By file, how many processes the kernel ended for memory since it counts: in our control group and on the machine.

    Args:
        root: where the system's files are; another one for tests.
    """
    counts: dict[str, int] = {}
    for path in (*_of_control_groups(root), root / "proc/vmstat"):
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError:  # not there, or not ours to read
            continue
        found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        counts |= {str(path): int(number) for number in found if number.isdecimal()}
    return counts


def why_killed(before: dict[str, int], root: Path = Path("/")) -> str:
    """What is likely behind a SIGKILL that none of our processes sent, by the kernel's counts now and ``before``."""
    if any(count > before.get(path, count) for path, count in kills_for_memory(root).items()):
        return "memory ran out, and the kernel ended it: it counts one more that it did"
    return "which the system sends when memory runs out"


def _of_control_groups(root: Path) -> list[Path]:
    """The files of this process's control groups that count: the second version's, and the first's."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    paths = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        group = group.lstrip("/")
        if not controllers:
            paths.append(root / "sys/fs/cgroup" / group / "memory.events")
        elif "memory" in controllers.split(","):
            paths += [root / "sys/fs/cgroup/memory" / part / "memory.oom_control" for part in ("", group)]
    return paths
