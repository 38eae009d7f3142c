"""The checker of the project's English finds each kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import language


@pytest.mark.parametrize("tree", ["src", "train", "benchmarks", "examples", "tests", "docs", "README.md"])
def test_texts_are_plain(tree: str) -> None:
    files = [path for path in language.all_files() if path.relative_to(language.ROOT).parts[0] == tree]
    assert files
    found = language.check(files)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('"""Of all ranks."""\n', "starts with 'Of'"),
        ('"""What is told to nobody."""\n', "banned 'told'"),
        ("x = 1  # so many ranks as there are\n", "banned 'so many'"),
        ('raise ValueError("a number that is none of these was foretold")\n', "banned 'foretold'"),
        (f'"""{"word " * 31}."""\n', "31 words"),
    ],
)
def test_what_is_not_plain_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    assert any(why in str(each) for each in language.check([path]))


def test_code_counts_as_one_word_and_names_in_it_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text('"""Read ``told`` and ``foretold``."""\ntold = None\n')
    assert language.check([path]) == []


@pytest.mark.parametrize(("page", "why"), [("word " * 25 + ".\n", "words a sentence"), ("x" * 9000, "bytes, at most")])
def test_a_page_has_short_sentences_and_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, why: str
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    path = tmp_path / "README.md"
    path.write_text(page)
    assert any(why in str(each) for each in language.check([path]))
