"""What the documentation site adds to Markdown: the pages of the root, the commands' help, a check of links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page as SitePage
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages, their links turned to where things are on the site."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        for other, target in PAGES.items():
            text = text.replace(f"]({other}", f"]({target}")
        # Sources are not on the site: name them there instead of linking.
        text = re.sub(r"\[([^\]]*)\]\(((?:src|examples)/[^)]*)\)", r"\1 (`\2`)", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each ``<!-- help: burst NAME -->`` with what that command's ``--help`` prints at 88 columns."""
    return re.sub(r"<!-- help: burst (\w+) -->", lambda found: f"```\n{help_of(found[1])}\n```", markdown)


def help_of(command: str) -> str:
    words = [sys.executable, "-m", "burst_attention.cli", command, "--help"]
    environment = {**os.environ, "COLUMNS": "88", "NO_COLOR": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).strip()
    return "\n".join(textwrap.fill(line, 88) for line in plain.splitlines())


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things in Sphinx's roles, :func:`so`; here the name is enough."""
    return re.sub(r":(?:func|meth|class|data|attr|mod|exc):(?=<code)", "", html)


def on_post_page(output: str, page: SitePage, **_: Any) -> str:
    """Replace the theme's one script from elsewhere, which lets a page that is opened from a file search."""
    shim = get_relative_url("search-from-file.js", page.url)
    return output.replace('src="https://unpkg.com/iframe-worker/shim"', f'src="{shim}"')


def on_post_build(config: Any) -> None:
    """Fail for a link that leads nowhere within the site, and for what a browser would fetch from elsewhere."""
    site = Path(config.site_dir)
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        wrong += [f"{path.name} fetches {url}" for url in page.fetched if urlsplit(url).scheme in ("http", "https")]
        for url in page.fetched + page.links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{path.relative_to(site)} links to {url}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{path.relative_to(site)} links to {url}: that page has no such anchor")
    if wrong:
        raise PluginError("\n".join(sorted(set(wrong))))


class Page(HTMLParser):
    """A page's links, what it fetches, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {"", "__skip", "__tabbed"}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next") and "href" in values:
            self.fetched.append(values["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in values:
            self.fetched.append(values["src"])
