"""The report of a comparison, as one HTML file that needs nothing else, and as Markdown.

Knows rows of figures, texts and pictures. Does not know runs, engines or matplotlib. All input is escaped; the HTML
fetches nothing, runs no script but its own two (one sorts the table, one plays the timeline), and works without them.
"""

import html
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from shoal.bench.cpu_noise import banner, noise_in
from shoal.bench.page_replay import ReplayFrame, script_source
from shoal.bench.page_style import CSS, SCRIPT

Row = Mapping[str, Any]  # {"preset", "label", "rate", **summarise(run)}
MISSING = "—"

COLOURED = "At most three lines are coloured: shoal, the fastest with groups and the fastest of the others."
# name of the plot → (heading, how to read it)
CAPTIONS = {
    "timeline": (
        "The batch over time",
        "Each lane is a request, left to right: a thin line while it waits, orange while its prompt is computed, blue "
        "while it decodes; what is hatched was computed for nothing: grey is padding, red came after its end or was a "
        "rejected draft. The dot marks its first token's arrival at the client. Other presets, and longer: shoal live "
        "live.jsonl, the file beside this report.",
    ),
    "throughput": (
        "Throughput against latency",
        "Each line is a preset, each point a rate. As the rate grows, a good system moves right and stays low, a bad "
        "one turns upwards. The last panel counts only requests that met the promise. " + COLOURED,
    ),
    "latency": (
        "First token and gaps",
        "Left: the share of requests whose first token arrived within a time. Right: the share of gaps longer than a "
        "time; a low right end means that no stream stalled. " + COLOURED,
    ),
    "tokens": (
        "Positions computed",
        "The requests are the same for all presets, so blue is about equally long, shorter where a prefix cache saved "
        "a part. To its right is what was recomputed, what was computed in vain (the row of a request that had ended, "
        "a rejected draft token) and padding.",
    ),
    "waiting": (
        "Head-of-line waiting",
        "Above: how long each request waited before its first pass. Below: the length of the queue. In a sawtooth, a "
        "group admits no request until it has finished. " + COLOURED,
    ),
    "work": (
        "Work per pass",
        "Each bar is a pass, as wide as its duration and as high as the positions it computed. The triangle marks the "
        "longest, during which every running stream waited for its next token.",
    ),
    "kv": (
        "KV memory, held and used",
        "Blue is used, hatched grey is held but empty: memory in which another request could have run.",
    ),
    "giant": (
        "One giant prompt among running streams",
        "Each dot is a token of a running stream, as high as the gap before it. The orange span is the giant's wait "
        "for its first token.",
    ),
}


# ---- the table: which figures, how they are written, and which is best


@dataclass(frozen=True)
class Column:
    """One figure of a row: its key, its format, and whether high or low is better."""

    heading: str
    key: str  # "ttft_s.p50": p50 of ttft_s
    write: Callable[[Any], str]
    better: str = ""  # high, low, or neither
    about: str = ""


def number(digits: int, scale: float = 1.0) -> Callable[[Any], str]:
    """
    >>> number(1, 1000)(1.2345)
    '1,234.5'
    """
    return lambda value: f"{value * scale:,.{digits}f}"


def share(value: Any) -> str:
    return f"{value:.0%}"


def rate_in_words(value: Any) -> str:
    return f"{value:g}" if value else "all at once"


# what most readers look for; the page lists every other figure below the table
COLUMNS = (
    Column("preset", "label", str),
    Column("rate", "rate", rate_in_words, about="requests per second offered"),
    Column("tok/s", "output_tok_s", number(1), "high", "output tokens per second"),
    Column("goodput req/s", "goodput_request_s", number(2), "high", "requests per second that met the promise"),
    Column("TTFT p99 s", "ttft_s.p99", number(2), "low", "time to first token, 99th percentile, seconds"),
    Column("gap p99 ms", "gap_s.p99", number(1, 1e3), "low", "between two tokens, 99th percentile"),
    Column("ms/token p50", "normalised_s.p50", number(1, 1e3), "low", "end to end per output token, median"),
    Column("wasted", "wasted_share", share, "low", "share of positions that were padding, recomputed or in vain"),
)


def look_up(row: Row, key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def written(row: Row, column: Column) -> str:
    value = look_up(row, column.key)
    return MISSING if value is None else column.write(value)


def best(rows: Sequence[Row], column: Column) -> set[int]:
    """Which rows are best in this column among those of their rate; none, if most are equally good."""
    found: set[int] = set()
    for rate in {row["rate"] for row in rows} if column.better else ():
        peers = [at for at, row in enumerate(rows) if row["rate"] == rate]
        fair = {at: look_up(rows[at], column.key) for at in peers if may_win(rows[at], column)}
        if len(fair) < 2:
            continue
        top = (max if column.better == "high" else min)(fair.values())
        winners = {at for at, value in fair.items() if value == top}
        if 2 * len(winners) <= len(fair):
            found |= winners
    return found


def may_win(row: Row, column: Column) -> bool:
    """A run in which no request finished cannot be best, nor one without streaming in the gaps."""
    if not row.get("finished") or look_up(row, column.key) is None:
        return False
    return not column.key.startswith("gap_s.") or (look_up(row, "gap_s.p50") or 0.0) > 1e-4


def by_rate(rows: Sequence[Row]) -> list[Row]:
    """Rows of one rate together; "all at once" comes last."""
    return sorted(rows, key=lambda row: row["rate"] or float("inf"))


def flat(row: Row) -> dict[str, Any]:
    """Every figure of a row under one name."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": one for inner, one in value.items()}
        else:
            found[key] = value
    return found


# ---- the words


def summary(rows: Sequence[Row]) -> str:
    """The table summarised in a paragraph."""
    if not rows:
        return "Nothing was run."
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: rate or float("inf"))
    presets = len({row["preset"] for row in rows})
    parts = [f"{count(presets, 'preset')} at {count(len(rates), 'rate')}, the same requests for all."]
    last = [row for row in rows if row["rate"] == rates[-1] and row.get("finished")]
    if last:
        where = f"At {rates[-1]:g} requests per second" if rates[-1] else "With all requests at once"
        parts += [f"{where}, {race(last)}", *remarks(last)]
    failed = [f"{row['label']} at {rate_in_words(row['rate'])}" for row in rows if not row.get("finished")]
    parts += [f"No request finished with {', '.join(failed)}."] if failed else []
    return " ".join(parts)


def count(many: int, what: str) -> str:
    return f"{many} {what}" + ("" if many == 1 else "s")


def race(rows: Sequence[Row]) -> str:
    fast, slow = (pick(rows, key=lambda row: row["output_tok_s"]) for pick in (max, min))
    text = f"{fast['label']} produced {fast['output_tok_s']:,.1f} tokens per second"
    if fast is slow or not slow["output_tok_s"]:
        return text + "."
    times = fast["output_tok_s"] / slow["output_tok_s"]
    return f"{text}, {times:.1f} times as many as {slow['label']} ({slow['output_tok_s']:,.1f})."


def remarks(rows: Sequence[Row]) -> list[str]:
    quick = min(row["normalised_s"]["p50"] for row in rows)
    parts = [
        f"The lowest median latency per output token was {quick * 1e3:,.1f} ms, "
        f"with {those(rows, 'normalised_s.p50', quick)}."
    ]
    good = max(row["goodput_share"] for row in rows)
    if good:
        parts.append(
            f"The promise was met most often, for {good:.0%} of requests, by {those(rows, 'goodput_share', good)}."
        )
    waste = max(row["wasted_share"] for row in rows)
    if waste:
        parts.append(f"Most waste: {waste:.0%} of all positions computed by {those(rows, 'wasted_share', waste)}.")
    return parts


def those(rows: Sequence[Row], key: str, value: float) -> str:
    """Names of the rows with this value; all of them if there are at most three."""
    names = [str(row["label"]) for row in rows if look_up(row, key) == value]
    if len(names) > 3:
        return f"{names[0]} and {len(names) - 1} others"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def plain(value: Any) -> str:
    """A value of the meta for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def noise_banner(rows: Sequence[Row]) -> list[str]:
    """The headline on other programs, if they disturbed a run."""
    return [text] if (text := banner([noise_in(row) for row in rows])) else []


def title_of(meta: Mapping[str, Any]) -> str:
    return str(meta.get("title", "Every batching system in one engine"))


def facts(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All of the meta that is not shown elsewhere."""
    elsewhere = ("title", "summary", "speed_up")
    return [(str(key).replace("_", " "), plain(value)) for key, value in meta.items() if key not in elsewhere]


def caption(name: str) -> tuple[str, str]:
    return CAPTIONS.get(name, (name.replace("_", " ").capitalize(), ""))


# ---- HTML


def write_html(
    path: Path,
    meta: Mapping[str, Any],
    rows: Sequence[Row],
    figures: Mapping[str, str],
    replay: ReplayFrame | None = None,
) -> None:
    """One file with everything in it. `figures` are SVG texts by name, shown in their order.

    `meta` may hold "title" and "summary"; all else in it is listed under "How it was measured". `replay` is shown with
    the timeline.
    """
    rows = by_rate(rows)
    title = html.escape(title_of(meta))
    intro = [str(meta["summary"])] if meta.get("summary") else []
    parts = [
        f"<h1>{title}</h1>",
        *(f'<p class="banner" role="note">{html.escape(text)}</p>' for text in noise_banner(rows)),
        *(f'<p class="summary">{html.escape(text)}</p>' for text in [*intro, summary(rows)]),
        '<nav aria-label="plots">' + " ".join(nav_link(name) for name in figures) + "</nav>",
        '<section id="table"><h2>Figures</h2>' + html_table(rows) + html_details(rows) + "</section>",
        *(html_figure(name, svg, replay if name == "timeline" else None) for name, svg in figures.items()),
        '<section id="meta"><h2>How it was measured</h2>' + html_facts(meta) + "</section>",
    ]
    scripts = " ".join(script_source(one) for one in (SCRIPT, *([replay.script] if replay else [])))
    page = PAGE.format(title=title, css=CSS, script=SCRIPT, scripts=scripts, body="\n".join(parts))
    path.write_text(page, encoding="utf-8")


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src {scripts}; img-src data:; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


def nav_link(name: str) -> str:
    return f'<a href="#plot-{slug(name)}">{html.escape(caption(name)[0])}</a>'


def html_table(rows: Sequence[Row]) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button" title="{html.escape(column.about or column.heading)}">'
        f"{html.escape(column.heading)}</button></th>"
        for column in COLUMNS
    )
    winners = [best(rows, column) for column in COLUMNS]
    lines = [html_row(row, [at in mine for mine in winners]) for at, row in enumerate(rows)]
    note = "Best of each rate in bold green. Click a heading to sort. Every other figure is below."
    return (
        f'<div class="scroll"><table class="figures"><thead><tr>{heads}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><p class="note">{note}</p>'
    )


def html_row(row: Row, wins: Sequence[bool]) -> str:
    cells = []
    for at, (column, win) in enumerate(zip(COLUMNS, wins, strict=True)):
        value, text = look_up(row, column.key), html.escape(written(row, column))
        sort_by = html.escape(str(value if value is not None else ""))
        mark = ' class="best"' if win else ""
        cells.append(
            f'<th scope="row" data-v="{sort_by}">{text}</th>' if not at else f'<td data-v="{sort_by}"{mark}>{text}</td>'
        )
    return f"<tr>{''.join(cells)}</tr>"


def html_details(rows: Sequence[Row]) -> str:
    """Every figure there is: one line for each, one column for each run."""
    each = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in each for name in row if name not in ("preset", "label", "rate")))
    heads = "".join(
        f'<th scope="col">{html.escape(str(row["label"]))}<br>{html.escape(rate_in_words(row["rate"]))}</th>'
        for row in each
    )
    lines = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(in_short(row.get(name)))}</td>" for row in each)
        + "</tr>"
        for name in names
    )
    return (
        "<details><summary>Every figure of every run</summary>"
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></details>"
    )


def in_short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else MISSING if value is None else str(value)


def html_figure(name: str, svg: str, replay: ReplayFrame | None = None) -> str:
    heading, how = caption(name)
    return (
        f'<section class="plot" id="plot-{slug(name)}"><h2>{html.escape(heading)}</h2>{replay.html if replay else ""}'
        f"<figure>{inline_svg(name, svg)}<figcaption>{html.escape(how)}</figcaption></figure></section>"
    )


def html_facts(meta: Mapping[str, Any]) -> str:
    lines = []
    for key, value in facts(meta):
        text = html.escape(value)
        lines.append(f"<dt>{html.escape(key)}</dt><dd>{f'<code>{text}</code>' if key == 'command' else text}</dd>")
    return f"<dl>{''.join(lines)}</dl>"


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def inline_svg(name: str, svg: str) -> str:
    """The drawing as part of a page: full width, ids made unique, nothing that fetches or runs."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if local(child.tag) in ("metadata", "script", "style", "foreignObject"):
                parent.remove(child)
    for one in root.iter():
        one.tag = local(one.tag)
        one.attrib = dict(kept_attributes(one.attrib, f"{slug(name)}-"))
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": caption(name)[0]}
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def local(tag: str) -> str:
    """The name without its namespace, which HTML implies."""
    return tag.rpartition("}")[2]


def kept_attributes(given: Mapping[str, str], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in given.items():
        name = local(key)
        if name == "href":
            if value.startswith("#"):
                yield name, f"#{prefix}{value[1:]}"
            elif value.startswith("data:image/png"):
                yield name, value
        elif name == "id":
            yield name, prefix + value
        elif not name.startswith("on"):
            yield name, re.sub(r"url\(#", f"url(#{prefix}", value)


# ---- Markdown


def write_markdown(path: Path, meta: Mapping[str, Any], rows: Sequence[Row], image_paths: Mapping[str, Path]) -> None:
    """The same as report.md; images are linked relative to it."""
    rows = by_rate(rows)
    intro = [str(meta["summary"])] if meta.get("summary") else []
    parts = [f"# {md(title_of(meta))}", *(f"> **{md(text)}**" for text in noise_banner(rows))]
    parts += [md(text) for text in [*intro, summary(rows)]]
    parts += ["## Figures", md_table(rows), "Best of each rate in bold."]
    for name, image in image_paths.items():
        heading, how = caption(name)
        link = quote(Path(os.path.relpath(image, path.parent)).as_posix())
        parts += [f"## {md(heading)}", f"![{md(heading)}]({link})", *([md(how)] if how else [])]
    lines = [f"- **{md(key)}**: {md_code(value) if key == 'command' else md(value)}" for key, value in facts(meta)]
    parts += ["## How it was measured", "\n".join(lines)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def md(text: str) -> str:
    """Text with Markdown's special characters escaped.

    >>> md("a|b *c*")
    'a\\\\|b \\\\*c\\\\*'
    """
    return re.sub(r"([\\`*_\[\]<>|#$~&])", r"\\\1", " ".join(text.split()))


def md_code(text: str) -> str:
    """Inline code, with as many backticks as needed."""
    flat_text = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", flat_text)), default=0) + 1)
    return f"{fence} {flat_text} {fence}" if "`" in flat_text else f"`{flat_text}`"


def md_table(rows: Sequence[Row]) -> str:
    """Aligned, so that it is readable as plain text."""
    winners = [best(rows, column) for column in COLUMNS]
    cells = [[md(column.heading) for column in COLUMNS]]
    for at, row in enumerate(rows):
        texts = [md(written(row, column)) for column in COLUMNS]
        cells.append([f"**{text}**" if at in mine else text for text, mine in zip(texts, winners, strict=True)])
    wide = [max(len(line[at]) for line in cells) for at in range(len(COLUMNS))]
    rule = ["-" * wide[0]] + ["-" * (size - 1) + ":" for size in wide[1:]]
    lines = [cells[0], rule, *cells[1:]]
    aligned = [
        [line[0].ljust(wide[0]), *(text.rjust(size) for text, size in zip(line[1:], wide[1:], strict=True))]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)
