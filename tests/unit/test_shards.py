"""A tensor file written piece by piece can be read by safetensors, and is written at a limited rate."""

import hashlib
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from burst_train.checkpoint import shards
from burst_train.checkpoint.manifest import fingerprint
from burst_train.checkpoint.shards import Pace, write_tensors

TENSORS = {
    "b": torch.arange(7, dtype=torch.int64),
    "a": torch.randn(3, 5),
    "half": torch.randn(3).bfloat16(),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "größer": torch.randn(5, 2).half(),
}
NAMES = {"b": "I64", "a": "F32", "half": "BF16", "number": "F64", "none": "F32", "größer": "F16"}


@pytest.mark.parametrize("part", [3, 2**22])
def test_safetensors_reads_what_was_written(tmp_path, monkeypatch, part):
    monkeypatch.setattr(shards, "PART", part)
    path = tmp_path / "x.safetensors"
    digest = write_tensors(path, TENSORS, NAMES, {"format": "pt"}, Pace())
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == fingerprint(path).sha256
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_it_rests_in_proportion_to_its_work_until_there_is_hurry(monkeypatch):
    monkeypatch.setattr(shards, "AT_ONCE", 1)
    times, rests, pace = iter([3.0, 3.0, 3.01, 3.01, 5.0, 5.0]), [], Pace()
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    monkeypatch.setattr(pace._hurry, "wait", rests.append)
    for _ in range(3):
        pace.rest()
    assert rests == [pytest.approx(shards.REST * 0.01), shards.LONGEST_REST], "none after the first piece"
    pace.hurry()
    pace.rest()
    assert len(rests) == 2


def test_hurry_ends_a_rest_at_once(monkeypatch):
    monkeypatch.setattr(shards, "AT_ONCE", 1)
    monkeypatch.setattr(shards, "LONGEST_REST", 600.0)
    monkeypatch.setattr(shards, "REST", 1e9)
    pace, begun = Pace(), threading.Event()

    def work():
        pace.rest()
        sum(range(10**5))
        begun.set()
        pace.rest()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    assert begun.wait(60)
    pace.hurry()
    worker.join(20)
    assert not worker.is_alive()
