"""What ``state.json`` of a checkpoint holds, and the states of random generators as JSON."""

from __future__ import annotations

import base64
import random
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from ..checked import Checked, Format, Natural
from ..data.sequences import Position

Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32"]  # safetensors' names
Size = Annotated[int, Field(ge=0, lt=2**63)]
Shape = tuple[Size, ...]


class TensorEntry(Checked):
    """A whole tensor."""

    dtype: Dtype
    shape: Shape


class Group(Checked, extra="ignore"):
    """A parameter group of AdamW. Its learning rate follows from the schedule."""

    parameters: list[str]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    initial_lr: float


class Optimizer(Checked):
    """The optimizer, without its moments. ``fewer``: steps of the parameters that took fewer, by name."""

    name: str
    steps: float
    groups: list[Group]
    fewer: dict[str, float] = Field(default_factory=dict)


class ScheduleState(Checked, extra="ignore"):
    """The position of the learning-rate schedule; the rate is recomputed."""

    last_epoch: Natural


class Losses(Checked):
    """Training losses of the first and the last step; the held-out loss after it, if measured."""

    first: float
    last: float
    held_out: float | None = None


class Generators(Checked):
    """One rank's states: Python's and numpy's as their generators take them, torch's in base64."""

    python: dict[str, Any]
    numpy: dict[str, Any]
    torch: str
    cuda: str | None = None


class State(Checked, extra="ignore"):
    """Everything of a run but its tensors; ``generators`` by rank, ``config`` by section."""

    format: Format
    step: Natural
    tensors: dict[str, TensorEntry]
    config: dict[str, dict[str, Any]]
    model: dict[str, Any]
    generation: dict[str, Any] | None = None
    optimizer: Optimizer
    schedule: ScheduleState
    generators: list[Generators]
    cursor: Position
    losses: Losses
    rates: dict[str, Any] | None = None  # by which the run's calls were planned; None until 0.3


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
    """Restore the states from :func:`read_generators`."""
    python, numpy = states.python, states.numpy
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    state = {"key": np.array(numpy["key"], np.uint32), "pos": numpy["pos"]}
    np.random.set_state({**numpy, "bit_generator": "MT19937", "state": state})
    torch.set_rng_state(_tensor(states.torch))
    if torch.cuda.is_initialized() and states.cuda is not None:
        torch.cuda.set_rng_state(_tensor(states.cuda))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
