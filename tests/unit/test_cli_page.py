"""docs/reference/cli.md equals the commands' output."""

from __future__ import annotations

import subprocess
import sys

from tests.tools.cli_page import PAGE, ROOT


def test_the_page_is_what_help_prints_today():
    code = "from tests.tools.cli_page import page; print(page(), end='')"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == PAGE.read_text("utf-8"), "python tests/tools/cli_page.py"
