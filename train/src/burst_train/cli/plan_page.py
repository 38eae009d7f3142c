"""The page of ``burst plan --html``: one self-contained file of tables and SVG drawings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate

import numpy as np

from burst_attention.plan.rows import Direction

from ..figures import bytes_text, seconds_text
from ..forecast.forecast import Forecast
from ..forecast.request import ForecastRequest
from ..forecast.timeline import Picture, drawn, picture
from .plan_words import command

WIDTH = 760
HATCH = (
    '<svg width="0" height="0"><defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 6L6 0" stroke="#999"/></pattern></defs></svg>'
)
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b;
  background: #fff; }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: pre; } .verdict { font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #333; }
code { background: #f3f3f3; padding: .1rem .3rem; } .wide { overflow-x: auto; }
"""


def page(
    headline: str,
    verdict: str,
    rows: Sequence[Sequence[str]],
    request: ForecastRequest,
    found: Sequence[Forecast],
    notes: Sequence[str],
) -> str:
    """Return the whole page as HTML text."""
    able = [each for each in found if not each.refused]
    sections = [
        f"{HATCH}<h1>{escape(headline)}</h1><p class=verdict>{escape(verdict)}</p>",
        f"<div class=wide>{_table(['per rank and step', *(each.engine for each in able)], rows)}</div>",
        *(f"<p>{escape(each.engine)}: not possible: {escape(each.refused)}</p>" for each in found if each.refused),
        *(
            f"<p>{escape(x.engine)}, {escape(x.way)}: <code>{escape(command(request, x.flags))}</code></p>"
            for x in able
            if x.flags
        ),
        "<h2>Memory by engine and --remat policy</h2>",
        _memory(request, able),
        *_pictures(request, able),
        f"<h2>Assumptions</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>",
    ]
    title = f"<meta charset=utf-8><title>{escape(headline)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{title}</head><body>\n" + "\n".join(sections) + "\n</body></html>\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(each)}</th>" for each in head)]
    lines += ["".join(f"<td>{escape(each)}</td>" for each in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(text)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _memory(request: ForecastRequest, able: Sequence[Forecast]) -> str:
    """Draw one bar per engine and ``--remat`` policy, split into parts, and a line at the limit."""
    bars = [(each, remat, parts) for each in able for remat, parts in each.memory.items()]
    names = [*dict.fromkeys(name for _, _, parts in bars for name in parts)]
    limit = request.limit or 0.0
    most, left, line = max([limit, *(sum(parts.values()) for _, _, parts in bars)], default=1.0), 225, 22
    drawing = []
    for n, (each, remat, parts) in enumerate(bars):
        y, scale = n * line + 4, (WIDTH - left - 80) / most
        drawing.append(_text(left - 6, y + 12, f"{each.engine}, {'none' if remat == 'none' else remat}", "end"))
        begins = [0, *accumulate(parts.values())]
        for name, size, begin in zip(parts, parts.values(), begins, strict=False):
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawing.append(_box(left + scale * begin, y, scale * size, 15, colour, f"{name} {bytes_text(size)}"))
        drawing.append(_text(left + scale * begins[-1] + 5, y + 12, bytes_text(begins[-1])))
    height = len(bars) * line + 8
    if limit:
        x = left + (WIDTH - left - 80) * limit / most
        drawing.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#c00" stroke-dasharray="4 3"/>')
    legend = [
        _box(left + 82 * n, height + 4, 10, 10, COLOURS[n % len(COLOURS)], name)
        + _text(left + 82 * n + 14, height + 13, name)
        for n, name in enumerate(names)
    ]
    text = f"<p>The dashed line is the memory that a step may use, {bytes_text(limit)}.</p>" if limit else ""
    return text + _svg(height + 22, [*drawing, *legend], "memory by part")


def _pictures(request: ForecastRequest, able: Sequence[Forecast]) -> Iterator[str]:
    """Yield drawings of each engine that uses our attention, for the layers with the widest window."""
    mask = next(iter(request.masks))
    for each in able:
        if not each.ways or request.cluster.ranks == 1:
            continue
        setting = drawn(each.ways[0], request.setting(mask))
        few = (
            ""
            if setting.world == request.cluster.ranks
            else (
                f" The drawing shows {setting.world} ranks with the same tokens per rank. Over all "
                f"{request.cluster.ranks:,} ranks the pattern continues; the table has their times."
            )
        )
        yield f"<h2>{escape(each.engine)}: {escape(each.way)}</h2><p>One layer's attention.{few}</p>"
        for direction in Direction:
            one = picture(each.ways[0], setting, direction)
            name = direction.name.lower()
            yield f"<h3>{name.capitalize()}</h3>"
            yield (
                f"<p>Left: {_coloured(one)} Rows are query owners, columns are key owners, for the first head group. "
                "Right: bytes sent from each rank (row) to each other rank (column).</p>"
            )
            yield _cells(one, name)
            yield "<p>Timeline: filled bars are computation; hatched bars are waits for the next step's input.</p>"
            yield _gantt(one, name)


def _coloured(one: Picture) -> str:
    """Return a sentence that explains the colours of cells."""
    computing = np.unique(one.ranks[one.ranks >= 0]).tolist()
    if len(computing) > 1:
        return "the colour of a cell is the rank that computes it; the number is the step."
    steps = len(np.unique(one.steps[one.ranks >= 0]))
    parts = f"in {steps} steps, shown by colour" if steps > 1 else "in one step"
    return (
        f"rank {computing[0]} computes every cell of its head group {parts}." if computing else "no cell is computed."
    )


def _cells(one: Picture, name: str) -> str:
    side = (WIDTH / 2 - 40) / one.world
    right, most, parts = WIDTH / 2 + 20, max(1.0, float(one.bytes.max())), []
    computing = np.unique(one.ranks[one.ranks >= 0]).tolist()
    for i, j in np.argwhere(one.ranks >= 0).tolist():
        rank, step = int(one.ranks[i, j]), int(one.steps[i, j])
        colour = COLOURS[(computing.index(rank) if len(computing) > 1 else step) % len(COLOURS)]
        parts.append(
            _box(20 + side * j, side * i, side - 0.5, side - 0.5, colour, f"({i}, {j}) on rank {rank}, step {step}")
        )
        if side > 14:
            parts.append(_text(20 + side * (j + 0.5), side * (i + 0.5) + 4, str(step), "middle"))
    for i, j in np.argwhere(one.bytes > 0).tolist():
        size = float(one.bytes[i, j])
        shade = 232 - round(200 * size / most)
        colour = f"rgb({shade},{shade},{min(255, shade + 40)})"
        parts.append(
            _box(right + side * j, side * i, side - 0.5, side - 0.5, colour, f"{i} to {j}: {bytes_text(size)}")
        )
    frame = f'x="{right:.1f}" y="0" width="{side * one.world:.1f}" height="{side * one.world:.1f}"'
    parts.append(f'<rect {frame} fill="none" stroke="#bbb"/>')
    return _svg(side * one.world + 4, parts, f"cells and messages of the {name}")


def _gantt(one: Picture, name: str) -> str:
    end = max((bar.end for bars in one.bars for bar in bars), default=0.0) or 1.0
    left, line, parts = 70, 26, []
    for n, (rank, bars) in enumerate(zip(one.shown, one.bars, strict=True)):
        parts.append(_text(left - 6, n * line + 16, f"rank {rank}", "end"))
        for bar in bars:
            x, width = left + (WIDTH - left - 10) * bar.begin / end, (WIDTH - left - 10) * (bar.end - bar.begin) / end
            took = seconds_text(bar.end - bar.begin)
            does = "waits" if bar.waits else "computes"
            colour = "url(#waits)" if bar.waits else COLOURS[bar.step % len(COLOURS)]
            parts.append(_box(x, n * line + 4, width, 18, colour, f"step {bar.step}: {does} {took}"))
    parts += [
        _text(left, len(one.shown) * line + 14, "0"),
        _text(WIDTH - 10, len(one.shown) * line + 14, seconds_text(end), "end"),
    ]
    return _svg(len(one.shown) * line + 20, parts, f"timeline of the {name}")
