"""The states of random generators, kept as JSON and set again."""

import json
import random

import numpy as np
import torch

from burst_train.checked import parse_json
from burst_train.checkpoint.state import Generators, read_generators, set_generators


def drawn() -> list[float]:
    """Two values of each generator; Python's and numpy's Gaussians come in pairs, of which one may be left."""
    python, others = [random.gauss(0.0, 1.0) for _ in range(2)], np.random.standard_normal(2)
    return [*python, random.random(), *others.tolist(), np.random.random(), *torch.randn(2).tolist()]


def test_every_generator_goes_on_where_it_was() -> None:
    before = read_generators()
    random.gauss(0.0, 1.0), np.random.standard_normal()  # one of each pair is left
    kept = json.dumps(read_generators()).encode()
    expected = drawn()
    drawn()
    set_generators(parse_json(kept, Generators, "state.json"))
    assert drawn() == expected
    set_generators(parse_json(json.dumps(before).encode(), Generators, "state.json"))
