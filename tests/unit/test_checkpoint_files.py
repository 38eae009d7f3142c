"""Checkpoints' files: damage is named before any part is used; generators go on; tensors are written piece by piece."""

import hashlib
import json
import random
import shutil
import threading
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from burst_attention import cli
from burst_train.checked import parse_json
from burst_train.checkpoint import files as checkpoint
from burst_train.checkpoint import writer
from burst_train.checkpoint.manifest import DamagedError, discard, fingerprint, read_state, seal
from burst_train.checkpoint.state import Generators, State, read_generators, set_generators
from burst_train.checkpoint.writer import Pace, write_tensors
from burst_train.cli.export import chosen
from burst_train.run.folder import list_checkpoints, name_of
from burst_train.run.lock import MARKER
from tests.support.checkpoints import state_at

SHARDS = ("shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors")


def write(out, step):
    """Write a checkpoint as two ranks do: ``w`` is split, and the second rank writes all of ``v``."""
    folder = out / "checkpoints" / f"{name_of(step)}.unfinished"
    folder.mkdir(parents=True)
    w = torch.arange(6.0).view(3, 2) + step
    places = ({"w": [0, 0]}, {"w": [2, 0], "v": [0]})
    pieces = ({"w": w[:2].clone()}, {"w": w[2:].clone(), "v": torch.arange(4, dtype=torch.int32)})
    for name, tensors, offsets in zip(SHARDS, pieces, places, strict=True):
        reported = json.dumps({key: {"saved_offsets": at} for key, at in offsets.items()})
        save_file(tensors, folder / name, metadata={"DCP_SHARDING_INFO": reported, "format": "pt"})
    table = {"w": {"dtype": "F32", "shape": [3, 2]}, "v": {"dtype": "I32", "shape": [4]}}
    (folder / "state.json").write_text(json.dumps(state_at(step, tensors=table)))
    seal(folder, step, {path.name: fingerprint(path) for path in folder.iterdir()})
    return out / "checkpoints" / name_of(step)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap(one, other):
    ours, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(ours)


def truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


def rewrite(folder, change):
    """Change the manifest with ``change``."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def sealed_again(folder, name):
    """Update the file's entry in the manifest, as a forger would."""
    rewrite(folder, lambda content: content["files"].update({name: fingerprint(folder / name).model_dump()}))


def forge_state(folder, change):
    content = json.loads((folder / "state.json").read_text())
    change(content)
    (folder / "state.json").write_text(json.dumps(content))
    sealed_again(folder, "state.json")


DAMAGES = {
    "a bit of a tensor": (lambda f: flip(f / SHARDS[0], -3), f"{SHARDS[0]} is damaged: its SHA-256"),
    "a bit of a header": (lambda f: flip(f / SHARDS[1], 20), f"{SHARDS[1]} is damaged"),
    "a bit of the state": (lambda f: flip(f / "state.json", 9), "state.json is damaged"),
    "truncated": (lambda f: truncate(f / SHARDS[0], 100), f"{SHARDS[0]} is truncated: 100 bytes, not "),
    "longer": (lambda f: (f / SHARDS[0]).open("ab").write(b"x"), f"{SHARDS[0]} is too long"),
    "missing": (lambda f: (f / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
    "the state missing": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "foreign": (lambda f: (f / "shard-00003.safetensors").write_bytes(b"x"), "shard-00003.safetensors is foreign"),
    "a foreign folder": (lambda f: (f / "more").mkdir(), "more is foreign: it is not in the manifest"),
    "a folder for a file": (
        lambda f: ((f / SHARDS[0]).unlink(), (f / SHARDS[0]).mkdir()),
        f"{SHARDS[0]} is not a file",
    ),
    "a link for a file": (
        lambda f: ((f / SHARDS[0]).rename(f.parent / "x"), (f / SHARDS[0]).symlink_to(f.parent / "x")),
        f"{SHARDS[0]} is not a file",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "there is no manifest.json, so this is not a whole"),
    "half a manifest": (lambda f: truncate(f / "manifest.json", 60), "manifest.json is not valid JSON"),
    "a deep manifest": (
        lambda f: (f / "manifest.json").write_text("[" * 10**6),
        "not valid JSON: recursion limit",
    ),
    "a list for a manifest": (
        lambda f: (f / "manifest.json").write_text("[1]"),
        r"manifest\.json must be an object, not \[1\]",
    ),
    "of another format": (
        lambda f: rewrite(f, lambda m: m.update(format=2)),
        "'format' must be 1, not 2",
    ),
    "of another step": (lambda f: rewrite(f, lambda m: m.update(step=4)), "but the folder's name has another step"),
    "a way out": (
        lambda f: rewrite(f, lambda m: m["files"].update({"../x": m["files"]["state.json"]})),
        "'../x' is not the name of a file in the folder",
    ),
    "a wrong hash": (
        lambda f: rewrite(f, lambda m: m["files"]["state.json"].update(sha256="x")),
        r"files, state\.json: 'sha256' must match pattern .*, not 'x'",
    ),
    "a wrong size": (
        lambda f: rewrite(f, lambda m: m["files"]["state.json"].update(bytes=True)),
        r"files, state\.json: 'bytes' must be a valid integer, not True",
    ),
    "an odd state": (
        lambda f: forge_state(f, lambda s: s.update(tensors=[])),
        r"'tensors' must be an object, not \[\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_it_taken(tmp_path, damage):
    older, newer = write(tmp_path, 4), write(tmp_path, 8)
    assert checkpoint.check(newer).step == 8
    change, reported = DAMAGES[damage]
    change(newer)
    with pytest.raises(DamagedError, match=reported) as raised:
        checkpoint.check(newer)
    assert str(newer) in str(raised.value)
    notes = []
    assert checkpoint.newest_whole(tmp_path, notes.append) == older
    assert len(notes) == 1 and str(newer) in notes[0]


def test_swapped_files_are_named(tmp_path):
    write(tmp_path, 4)
    newer = write(tmp_path, 8)
    swap(newer / "state.json", newer / SHARDS[0])
    with pytest.raises(DamagedError, match=r"state\.json is too long|state\.json is truncated"):
        checkpoint.check(newer)
    swap(newer / "state.json", newer / SHARDS[0])
    swap(newer / SHARDS[0], newer.with_name(name_of(4)) / SHARDS[0])  # of one size
    with pytest.raises(DamagedError, match="is damaged"):
        checkpoint.check(newer)


def test_whole_checkpoints_under_each_others_names_are_reported(tmp_path):
    older, newer = write(tmp_path, 4), write(tmp_path, 8)
    older.rename(tmp_path / "x")
    newer.rename(older)
    (tmp_path / "x").rename(newer)
    with pytest.raises(DamagedError, match=r"every checkpoint in .* is damaged") as raised:
        checkpoint.newest_whole(tmp_path, pytest.fail)
    assert str(raised.value).count("but the folder's name has another step") == 2
    reported = str(checkpoint.not_resumed(raised.value))
    assert reported.startswith("--resume: every checkpoint") and reported.endswith(
        "Give --overwrite instead of --resume to start the run again"
    )
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="holds no checkpoint") as raised:
        checkpoint.newest_whole(tmp_path, pytest.fail)
    assert str(checkpoint.not_resumed(raised.value)).endswith("omit --resume to start a new run")


def test_a_runs_folder_is_exported_by_its_newest_checkpoint_or_its_best(tmp_path, capsys):
    run = tmp_path / "run"
    older, newer = write(run, 4), write(run, 8)
    (run / MARKER).write_text('{"format": 1, "wrote": []}')
    assert chosen(run, pytest.fail, best=False) == newer
    assert chosen(older, pytest.fail, best=False) == older
    for folder, loss in ((older, 1.0), (newer, 2.0)):
        forge_state(folder, lambda state, loss=loss: state.update(losses={"first": 3.0, "last": 3.0, "held_out": loss}))
    assert chosen(run, pytest.fail, best=True) == older
    flip(newer / SHARDS[0], -3)
    notes = []
    assert chosen(run, notes.append, best=False) == older
    assert len(notes) == 1 and f"{newer}: {SHARDS[0]} is damaged" in notes[0]


def test_what_is_missing_is_called_missing_and_what_there_is_named(tmp_path, capsys):
    run = tmp_path / "run"
    newer = write(run, 8)
    (run / MARKER).write_text('{"format": 1, "wrote": []}')

    def reported(*words):
        assert cli.main(["export", *map(str, words), str(tmp_path / "exported")]) == 2
        return " ".join(capsys.readouterr().err.split())

    missing = f"burst export: CHECKPOINT '{tmp_path}/nowhere' is missing: there is no such folder"
    assert reported(tmp_path / "nowhere") == reported("--best", tmp_path / "nowhere") == missing
    gone = newer.with_name(name_of(9))
    there = f"; give '{run}' to export its newest checkpoint, {newer.name}, or add --best"
    assert reported(gone) == f"burst export: CHECKPOINT '{gone}' is missing: there is no such folder{there}"
    discard(newer)
    assert reported(run) == f"burst export: CHECKPOINT '{run}' is a run that holds no checkpoint"
    (run / "model").mkdir()
    trained = f"; its trained model is already a Hugging Face folder: '{run}/model'"
    assert reported(run) == f"burst export: CHECKPOINT '{run}' is a run that holds no checkpoint{trained}"
    assert reported(gone).endswith(f"is missing: there is no such folder{trained}")


def test_what_is_being_written_or_removed_is_no_checkpoint(tmp_path):
    newer = write(tmp_path, 8)
    shutil.copytree(newer, newer.with_name(f"{name_of(12)}.unfinished"))
    (newer.parent / "step-x").mkdir()
    assert list_checkpoints(tmp_path) == [newer]
    discard(newer)
    assert not newer.exists()


def test_a_checkpoint_is_written_over_what_was_damaged_at_its_step(tmp_path):
    first = write(tmp_path, 8)
    flip(first / SHARDS[0], -1)
    assert write(tmp_path, 8) == first
    assert checkpoint.check(first).step == 8


@pytest.mark.long
def test_a_thousand_broken_files_and_states_are_errors_and_take_no_memory(tmp_path):
    newer = write(tmp_path, 8)
    file, state = newer / SHARDS[0], newer / "state.json"
    whole = {file: file.read_bytes(), state: state.read_bytes()}
    drawn = random.Random(0)
    tracemalloc.start()
    for number in range(1000):
        path = (file, state)[number % 2]
        data = bytearray(whole[path])
        for _ in range(drawn.randint(1, 4)):
            data[drawn.randrange(min(len(data), 300))] = drawn.randrange(256)
        data = data[: drawn.randint(0, len(data))] if drawn.random() < 0.3 else data
        path.write_bytes(data)
        if data != whole[path]:
            with pytest.raises(DamagedError):
                checkpoint.check(newer)
        with suppress(ValueError):
            parse_json(state.read_bytes(), State, state.name)  # what a hash would have kept from it
        path.write_bytes(whole[path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
    assert read_state(newer).step == 8


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
    monkeypatch.setattr(writer, "PART", part)
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
    monkeypatch.setattr(writer, "AT_ONCE", 1)
    times, rests, pace = iter([3.0, 3.0, 3.01, 3.01, 5.0, 5.0]), [], Pace()
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    monkeypatch.setattr(pace._hurry, "wait", rests.append)
    for _ in range(3):
        pace.rest()
    assert rests == [pytest.approx(writer.REST * 0.01), writer.LONGEST_REST], "none after the first piece"
    pace.hurry()
    pace.rest()
    assert len(rests) == 2


def test_hurry_ends_a_rest_at_once(monkeypatch):
    monkeypatch.setattr(writer, "AT_ONCE", 1)
    monkeypatch.setattr(writer, "LONGEST_REST", 600.0)
    monkeypatch.setattr(writer, "REST", 1e9)
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
