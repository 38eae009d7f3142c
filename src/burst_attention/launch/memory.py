"""Find out whether the kernel killed a process because memory ran out, from the kernel's own counters."""

from __future__ import annotations

from pathlib import Path


def kills_for_memory(root: Path = Path("/")) -> dict[str, int]:
    """Return the kernel's out-of-memory kill counts by file, for our control groups and for the machine."""
    counts: dict[str, int] = {}
    for path in (*_of_control_groups(root), root / "proc/vmstat"):
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError:  # missing or not readable
            continue
        found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        counts |= {str(path): int(number) for number in found if number.isdecimal()}
    return counts


def why_killed(before: dict[str, int], root: Path = Path("/")) -> str:
    """Explain a SIGKILL that no process of ours sent, from the kernel's counts now and ``before``."""
    if any(count > before.get(path, count) for path, count in kills_for_memory(root).items()):
        return "memory ran out, and the kernel ended it: the kernel's count of such kills rose"
    return "which the system sends when memory runs out"


def _of_control_groups(root: Path) -> list[Path]:
    """Return the files with kill counts of this process's control groups, for cgroup versions 2 and 1."""
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
