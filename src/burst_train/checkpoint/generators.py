"""States of this process's random generators, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from ..checked import Checked


class Generators(Checked):
    """One rank's states: Python's and numpy's as their generators take them, torch's in base64."""

    python: dict[str, Any]
    numpy: dict[str, Any]
    torch: str
    cuda: str | None = None


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


def set_generators(states: Generators) -> None:
    """Restore the states from :func:`read_generators`; ValueError if one is invalid."""
    python, numpy = states.python, states.numpy
    try:
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        state = {"key": np.array(numpy["key"], np.uint32), "pos": numpy["pos"]}
        np.random.set_state({**numpy, "bit_generator": "MT19937", "state": state})
        torch.set_rng_state(_tensor(states.torch))
        if torch.cuda.is_initialized() and states.cuda is not None:
            torch.cuda.set_rng_state(_tensor(states.cuda))
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, IndexError) as error:
        raise ValueError(f"the checkpoint's generator states are not valid: {error}") from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
