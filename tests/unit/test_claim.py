"""The folders that a run may write to, and those that it must not touch."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from burst_train.run.lock import MARKER, RunFolderLock, check_inputs, claimed

WRITES = ("new.txt", "model/*.json", "model.unfinished")


def claim(out, *, overwrite=False):
    return claimed(str(out), by="burst test", overwrite=overwrite, writes=WRITES)


def run(out, *, overwrite=False):
    """Write as a run does: a file, and a folder that is moved when complete."""
    with claim(out, overwrite=overwrite) as marker:
        marker.remove_old()
        marker.add("new.txt", "model.unfinished/")
        (out / "new.txt").write_text("by a run")
        (out / "model.unfinished").mkdir()
        (out / "model.unfinished" / "config.json").write_text("{}")
        marker.move("model.unfinished", "model")


def files(out):
    return {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_a_new_or_empty_folder_is_written_to(tmp_path, there):
    out = tmp_path / "deep" / "run"
    if there != "nothing":
        out.mkdir(parents=True)
    run(out)
    marker = json.loads((out / MARKER).read_text())
    assert (marker["format"], marker["by"], marker["process"]) == (1, "burst test", os.getpid())
    assert set(marker["wrote"]) == {"new.txt", "model/config.json"} == files(out).keys() - {MARKER}


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with claim(tmp_path / "deep" / "run"):
        assert (tmp_path / "deep" / "run" / MARKER).exists()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["notes.txt", "model/config.json", "new.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_no_run_marked_is_left_alone(tmp_path, name, overwrite):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="no marker of an earlier run"), claim(tmp_path, overwrite=overwrite):
        pytest.fail("it was given away")
    assert files(tmp_path) == {name: "mine"}


def test_only_what_the_earlier_run_wrote_is_replaced(tmp_path):
    run(tmp_path)
    theirs = {"notes.txt": "mine", "model/notes.txt": "mine", "tensorboard/old": "mine"}
    for name, text in theirs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"already holds a run; choose another folder or add --overwrite"):
        run(tmp_path)
    with claim(tmp_path, overwrite=True) as marker:
        assert (tmp_path / "new.txt").exists(), "not before the run begins"
        marker.remove_old()
        assert files(tmp_path).keys() - {MARKER} == theirs.keys()
    run(tmp_path)
    assert theirs.items() <= files(tmp_path).items()


@pytest.mark.parametrize("name", ["model/other.json", "model.unfinished/x", "link"])
def test_what_no_run_wrote_is_not_written_over(tmp_path, name):
    run(tmp_path)
    if name == "link":  # to a model of somebody's
        (tmp_path / "model").rename(tmp_path / "kept")
        (tmp_path / "model").symlink_to(tmp_path / "kept")
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"{name.split('/')[0] if name != 'link' else 'model'}.*which no run wrote"):
        run(tmp_path, overwrite=True)
    RunFolderLock(tmp_path).remove_old()  # nor would it be removed
    assert before.items() - files(tmp_path).items() <= {("new.txt", "by a run"), *before.items()}
    assert (tmp_path / "kept" / "config.json").exists() if name == "link" else (tmp_path / name).exists()


@pytest.mark.parametrize(
    "text", ['{"format": 2, "wrote": []}', '{"format": 1, "wrote": ["../x"]}', "[", '{"wrote": [""]}']
)
def test_a_marker_that_is_not_understood_protects_the_folder(tmp_path, text):
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(ValueError, match="is not of format 1"), claim(tmp_path, overwrite=True):
        pytest.fail("it was given away")
    assert files(tmp_path) == {MARKER: text}


def hold(out, ready):
    with claim(Path(out)) as marker:
        marker.add("new.txt")
        (Path(out) / "new.txt").write_text("of the one who was killed")
        ready.send(os.getpid())
        signal.pause()


def test_one_run_at_a_time_and_a_killed_one_holds_nothing(tmp_path):
    out = tmp_path / "run"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(str(out), theirs), daemon=True)
    process.start()
    pid = ours.recv()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"is in use by burst test, process {pid} on "):
            run(out, overwrite=overwrite)
    process.kill()
    process.join()
    with pytest.raises(ValueError, match="already holds a run"):
        run(out)
    run(out, overwrite=True)
    assert files(out)["new.txt"] == "by a run"


@pytest.mark.parametrize("out", ["file", "file/run", "/sys/run", "x" * 300])
def test_what_can_not_be_a_folder_is_refused(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    with pytest.raises(ValueError, match=r"^--out .* can't be "), claim(out, overwrite=True):
        pytest.fail("it was given away")
    assert files(tmp_path) == {"file": "mine"}


def test_inputs_inside_the_output_are_refused_through_links(tmp_path):
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(out / "model")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to(out / "model" / "config.json")
    (tmp_path / "alias").symlink_to(out)
    for given in ("run/model", "run", "link", "link/config.json", "snapshot", "alias/model"):
        for folder in (out, tmp_path / "alias"):
            with pytest.raises(ValueError, match=f"^--model '.*{given}' lies in --out "):
                check_inputs(str(folder), {"--data": "stdlib", "--model": str(tmp_path / given)})
    check_inputs(str(out), {"--data": str(tmp_path), "--model": str(tmp_path / "nothing"), "--tokenizer": None})


def test_a_way_through_a_folder_that_is_yet_to_be_made_leads_where_it_says(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="after a missing folder"), claim(tmp_path / "new" / ".."):
        pytest.fail("it was given away")
    assert files(tmp_path) == {"mine.txt": "mine"}


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1, "wrote": "ab"}',
        '{"format": 1, "wrote": {"a": 1}}',
        '{"format": true, "wrote": ["a"]}',
        '{"format": 1, "wrote": [".burst-run.json"]}',
        "[" * 100_000,
    ],
)
def test_a_marker_that_was_edited_removes_nothing(tmp_path, text):
    for name in ("a", "b"):
        (tmp_path / name).write_text("mine")
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(ValueError, match="not of format 1"), claim(tmp_path, overwrite=True) as marker:
        marker.remove_old()
    assert files(tmp_path) == {"a": "mine", "b": "mine", MARKER: text}


def test_a_name_too_long_for_a_file_is_passed_over(tmp_path):
    (tmp_path / MARKER).write_text(json.dumps({"format": 1, "wrote": ["x" * 5000]}))
    with pytest.raises(ValueError, match="can't be written to"), claim(tmp_path):
        pytest.fail("it was given away")
    with claim(tmp_path, overwrite=True) as marker:
        marker.remove_old()
