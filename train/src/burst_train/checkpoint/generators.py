"""States of this process's random generators, as JSON."""

from __future__ import annotations

import base64
import binascii
import random
from typing import Any

import numpy as np
import torch

from ..checked import Checked


def read_generators() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch; with CUDA in use, the GPU's too."""
    version, numbers, gauss = random.getstate()
    ours: dict[str, Any] = {"python": {"version": version, "numbers": list(numbers), "gauss": gauss}}
    state: dict[str, Any] = np.random.get_state(legacy=False)
    key = [int(number) for number in state["state"]["key"]]
    ours["numpy"] = {"key": key, "pos": state["state"]["pos"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]}
    ours["torch"] = _text(torch.get_rng_state())
    if torch.cuda.is_initialized():
        ours["cuda"] = _text(torch.cuda.get_rng_state())
    return ours


def set_generators(content: Checked) -> None:
    """Restore the states from :func:`read_generators`.

    Raises:
        ValueError: a state is invalid.
    """
    python, numpy = content.part("python"), content.part("numpy")
    try:
        numbers = tuple(python.value("numbers", list))
        random.setstate((python.non_negative_int("version"), numbers, python.content.get("gauss")))
        state = {"key": np.array(numpy.value("key", list), np.uint32), "pos": numpy.non_negative_int("pos")}
        rest = {name: numpy.number(name) for name in ("has_gauss", "gauss")}
        rest["has_gauss"] = int(rest["has_gauss"])
        np.random.set_state({"bit_generator": "MT19937", "state": state} | rest)
        torch.set_rng_state(_tensor(content, "torch"))
        if torch.cuda.is_initialized() and "cuda" in content.content:
            torch.cuda.set_rng_state(_tensor(content, "cuda"))
    except (TypeError, OverflowError, RuntimeError, IndexError) as error:
        raise ValueError(f"{content.where}: these are not valid generator states ({error})") from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(content: Checked, name: str) -> torch.Tensor:
    try:
        data = base64.b64decode(content.value(name, str), validate=True)
    except binascii.Error:
        raise content.wrong(name, "must be base64") from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
