"""Check the project's English: banned phrases, long sentences, docstrings that start badly, page sizes.

    python tests/tools/language.py [FILE ...]

Without files it checks every Python file and every page. It exits with status 1 if it finds anything.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
MOST_WORDS = 30  # a sentence; the aim is 25, and code words count as one
MOST_WORDS_ON_AVERAGE = 20  # a page
SIZES = {"README.md": 8 * 1024, "docs/architecture.md": 15 * 1024}  # bytes
# Programs write these pages; CHANGELOG is history, and its old entries stay as they were published.
GENERATED = ("docs/models.md", "docs/refusals.md", "docs/attached.md", "docs/reference/cli.md", "CHANGELOG.md")
TREES = ("src", "train", "benchmarks", "examples", "tests", "docs")
BANNED = (
    r"told",
    r"foret\w+",
    r"nobody",
    r"so many",
    r"anew",
    r"besides?",
    r"hears? of",
    r"(?:is|are) (?-i:none)",
    r"that which",
    r"for want of",
    r"but for",
    r"as many as there are",
    r"of (?:its|their|one's) own",
    r"goes on if",
    r"by what",
    r"thereof",
    r"whence",
    r"makes? (?:its|their) own way",
    r"runs? on paper",
    r"on paper",
    r"answers? to",
    r"the matter",
    r"becomes of",
)
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\$[^$]*\$|:\w+:`[^`]*`|https?://\S+|\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?:;])[\"')\]]*\s+|\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.|\w+(?:, \w+)*:\s))|(?<=\|)")


@dataclass(frozen=True)
class Finding:
    """One place to rewrite."""

    path: Path
    line: int
    why: str
    text: str

    def __str__(self) -> str:
        shown = " ".join(self.text.split())
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.why}: {shown[:110]}"


def sentences(text: str) -> Iterator[str]:
    """Split prose at full stops, colons, semicolons, list items and blank lines; a code span counts as one word."""
    plain = _CODE.sub(lambda found: found.group(1) or "code", text)
    for sentence in _END.split(plain):
        enumeration = sentence.count(",") > 6  # sizes and settings, in a row
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 2 and not enumeration:
            yield sentence


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return len(re.findall(r"[A-Za-z0-9][\w'.,/-]*", sentence))


def of_python(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) for each docstring, block of comments and string with spaces in a Python file."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                yield node.body[0].lineno, "docstring", text
    for node in ast.walk(tree):
        string = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if string and node.value.count(" ") >= 2:  # type: ignore[attr-defined]
            yield node.lineno, "string", node.value  # type: ignore[attr-defined]
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# type:", "# noqa")):
            text = token.string.lstrip("# ")
            if lines and lines[-1][0] == token.start[0] - 1 and token.line.lstrip().startswith("#"):
                lines[-1] = (token.start[0], f"{lines[-1][1]} {text}")
            else:
                lines.append((token.start[0], text))
    for line, text in lines:
        yield line, "comment", text


def without_code(page: str) -> str:
    """Blank out a page's code blocks and HTML; keep its line numbers."""
    blank = lambda found: "\n" * found.group().count("\n")  # noqa: E731
    return re.sub(r"```.*?```|<!--.*?-->|<[^>]+>|^(?: {4}|\t).*$", blank, page, flags=re.DOTALL | re.MULTILINE)


def check_python(path: Path) -> Iterator[Finding]:
    """Find what to rewrite in a Python file."""
    for line, kind, text in of_python(path):
        if kind == "docstring" and re.match(r"Of\b", text):
            yield Finding(path, line, "a docstring starts with 'Of'", text)
        yield from _check_text(path, line, text, long=kind != "string")


def check_page(path: Path) -> Iterator[Finding]:
    """Find what to rewrite in a page."""
    page = path.read_text()
    prose = without_code(page)
    for number, line in enumerate(prose.splitlines(), 1):
        yield from _check_text(path, number, line, long=not line.startswith("|"))
    counts = [words(sentence) for sentence in sentences(prose) if "|" not in sentence]
    if counts and mean(counts) > MOST_WORDS_ON_AVERAGE:
        yield Finding(path, 1, f"{mean(counts):.1f} words a sentence, at most {MOST_WORDS_ON_AVERAGE}", page)
    most = SIZES.get(str(path.relative_to(ROOT)))
    if most and path.stat().st_size > most:
        yield Finding(path, 1, f"{path.stat().st_size} bytes, at most {most}", page)


def _check_text(path: Path, line: int, text: str, *, long: bool) -> Iterator[Finding]:
    plain = _CODE.sub(lambda found: found.group(1) or "code", text)
    for found in _BANNED.finditer(plain):
        yield Finding(path, line, f"banned {found.group()!r}", plain[max(found.start() - 40, 0) : found.end() + 40])
    for sentence in sentences(text) if long else ():
        if words(sentence) > MOST_WORDS:
            yield Finding(path, line, f"{words(sentence)} words", sentence)


def all_files() -> list[Path]:
    """Every Python file and page that we write by hand."""
    found = [ROOT / "README.md"]
    for tree in TREES:
        found += [*(ROOT / tree).rglob("*.py"), *(ROOT / tree).rglob("*.md")]
    # This checker and its test quote the banned words.
    left_out = {ROOT / name for name in GENERATED} | {Path(__file__).resolve(), ROOT / "tests/unit/test_language.py"}
    return sorted(path for path in found if path not in left_out and "site" not in path.parts)


def check(paths: Sequence[Path]) -> list[Finding]:
    """All findings in these files."""
    return [f for path in paths for f in (check_page if path.suffix == ".md" else check_python)(path)]


if __name__ == "__main__":
    listed = check([Path(name).resolve() for name in sys.argv[1:]] or all_files())
    print("\n".join(map(str, listed)))
    sys.exit(bool(listed))
