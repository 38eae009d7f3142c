"""Ctrl-C ends a command in one line with status 130, from its first import on, and without a traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest

ENTRY = "import sys; from burst_train.entry import main; sys.exit(main())"
COMMAND = "from burst_attention import cli; cli.COMMANDS['slow'] = ('slow_command', '')\n" + ENTRY
MODULES = {
    # An import that turns every exception into another, as C extensions do.
    "torch": """
import time
try:
    print("now", flush=True)
    time.sleep(60)
except BaseException:
    raise ImportError("no torch")
""",
    "slow_command": """
import time
print("now", flush=True)
def main(arguments):
    time.sleep(60)
""",
    # Python drops what is raised in a finalizer.
    "slow_finalizer": """
import time
class Last:
    def __del__(self):
        print("now", flush=True)
        time.sleep(60)
def main(arguments):
    Last()
    time.sleep(60)
""",
    "slow_ranks": """
import os
import time
print("now", flush=True)
time.sleep(1)
os._exit(0)  # in place of the imports that follow
""",
}
STARTING = """
import time
from burst_attention.launch.local import prepare
def main(arguments):
    prepare("slow_ranks")
    time.sleep(60)
"""


def interrupted(tmp_path, program, modules, words, before="now"):
    """Run a program, send Ctrl-C to all of its processes once it prints ``before``; return (status, errors)."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        **pipes,
    )
    for line in process.stdout:
        if before in line:
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize("command", ["train", "check", "--version"])
def test_while_torch_is_imported(tmp_path, command):
    modules = {"torch": MODULES["torch"]}
    assert interrupted(tmp_path, ENTRY, modules, [command]) == (130, "burst: interrupted\n")


def test_while_a_command_runs(tmp_path):
    modules = {"slow_command": MODULES["slow_command"]}
    assert interrupted(tmp_path, COMMAND, modules, ["slow"]) == (130, "burst slow: interrupted\n")


def test_while_a_finalizer_runs(tmp_path):
    modules = {"slow_command": MODULES["slow_finalizer"]}
    assert interrupted(tmp_path, COMMAND, modules, ["slow"]) == (130, "burst slow: interrupted\n")


def test_while_ranks_are_prepared(tmp_path):
    modules = {"slow_command": STARTING, "slow_ranks": MODULES["slow_ranks"]}
    assert interrupted(tmp_path, COMMAND, modules, ["slow"]) == (130, "burst slow: interrupted\n")


RUNS = {
    "plan": ["plan", "--model", "llama-2-7b"],
    "check": ["check", "--ranks", "2"],
    "train": ["train", "--steps", "1000", "--ranks", "2", "--seq-len", "512", "--out", "run"],
    "calibrate": ["calibrate", "--ranks", "2"],
}


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.3, 3.0])
@pytest.mark.parametrize("command", RUNS)
def test_a_command_at_any_time(tmp_path, command, seconds):
    program = f"print('now', flush=True)\n{ENTRY}"
    (tmp_path / "data.txt").write_text("some words of a text " * 2000, "utf-8")
    words = RUNS[command] + (["--data", "data.txt"] if command == "train" else [])
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors
    assert process.returncode in (130, 0) or (process.returncode, command) == (75, "train")
