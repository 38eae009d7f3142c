"""Every case of tests/support/refusal_cases.py is refused by the library, with that class and message on all ranks."""

import contextlib
import io
import os
import shlex
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from burst_attention import Mask, cli, make_plan
from burst_attention.testing import local_world
from tests.support.refusal_cases import AREAS
from tests.tools.families import is_ours


@pytest.mark.parametrize("area", AREAS)
def test_each_case_is_refused_on_all_ranks(area: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, names, world = AREAS[area]

    def ask(group: Any) -> list[str]:
        known = names(group)
        return [reported(call, known) for call, _ in cases]

    monkeypatch.chdir(tmp_path)
    with no_job():
        if world == 1:
            answers = [ask(None)]
        else:
            with local_world(world, timeout=30) as ranks:
                answers = ranks.run(ask)
    classes = [[text.split(":")[0] for text in rank] for rank in answers]
    assert all(rank == classes[0] for rank in classes)
    wrong = [(call, text) for (call, start), text in zip(cases, answers[0], strict=True) if not text.startswith(start)]
    assert not wrong


@contextlib.contextmanager
def no_job() -> Iterator[None]:
    """Run without torchrun's variables, and without a hub; restore the environment."""
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        yield


def reported(call: str, known: dict[str, Any]) -> str:
    """Return the error's class and its text in one line. AssertionError if the call is not refused."""
    if call.startswith("burst "):
        return printed_by_command(call)
    try:
        eval(call, known)
    except Exception as error:
        if not is_ours(error):
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise AssertionError(f"{call} is not refused")


def printed_by_command(line: str) -> str:
    words = shlex.split(line)
    started = AssertionError(f"{line} is not refused: it starts ranks")
    with (
        contextlib.redirect_stderr(io.StringIO()) as screen,
        mock.patch("burst_attention.launch.local.launch", side_effect=started),
    ):
        status = cli.main(words[1:])
    text, start = screen.getvalue(), f"{' '.join(words[:2])}: "
    assert status == 2, f"{line}: exit status {status}, {text}"
    assert text.startswith(start), text
    return f"exit status 2: {' '.join(text.removeprefix(start).split())}"


def test_what_is_not_refused_is_no_case() -> None:
    known = {"make_plan": make_plan, "Mask": Mask}
    with pytest.raises(AssertionError, match="is not refused"):
        reported("make_plan(8)", known)
    with pytest.raises(NameError):  # a slip in the case itself
        reported("make_plan(eight)", known)
    with pytest.raises(AssertionError, match="exit status 0"):
        reported("burst --version", known)
