"""The live page inside the report: a frame that plays a recording and needs nothing but the report's own file.

Owns how the page's files and a recording become one document: scripts are joined into one, the recording is compressed,
and the document is the frame's srcdoc, so that the report's Content-Security-Policy holds in it. Knows neither what the
scripts do nor what the lines mean.
"""

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources.abc import Traversable

SCRIPTS = ("live-model", "live-draw", "live-story", "live")  # each may import those before it
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w-]+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.MULTILINE)


@dataclass(frozen=True)
class ReplayFrame:
    """The frame, and the script that the policy must allow."""

    html: str
    script: str


def replay_frame(lines: Iterable[str], static: Traversable, panes: int) -> ReplayFrame:
    """`static`: the folder of the live page's files."""
    script = joined([(name, (static / f"{name}.js").read_text(encoding="utf-8")) for name in SCRIPTS])
    packed = base64.b64encode(gzip.compress("\n".join(lines).encode(), mtime=0)).decode()
    icon = "data:image/svg+xml;base64," + base64.b64encode((static / "icon.svg").read_bytes()).decode()
    page = (static / "live.html").read_text(encoding="utf-8").replace("static/icon.svg", icon)
    style = (static / "live.css").read_text(encoding="utf-8")
    for what, instead in (
        ('<link rel="stylesheet" href="static/live.css">', f"<style>{style}</style>"),
        ('<script src="static/live.js" type="module"></script>', ""),
        (
            "</body>",
            f'<script type="application/gzip" id="recording">{packed}</script>\n<script>{script}</script>\n</body>',
        ),
    ):
        assert page.count(what) == 1, f"live.html has changed: {what}"
        page = page.replace(what, instead)
    frame = (
        f'<iframe class="replay panes{panes}" title="The batch over time, to be played" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )
    return ReplayFrame(frame, script)


def joined(files: Iterable[tuple[str, str]]) -> str:
    """Modules as one script: each in a function of its own, which returns what it exports.

    >>> print(joined([("a", "export const one = 1;"), ("b", 'import {one} from "./a.js";\\nrun(one);')]))
    (() => {
    "use strict";
    const modules = {};
    modules["a"] = (() => {
    const one = 1;
    return {one};
    })();
    modules["b"] = (() => {
    const {one} = modules["a"];
    run(one);
    return {};
    })();
    })();
    """
    parts = ["(() => {", '"use strict";', "const modules = {};"]
    for name, source in files:
        names = ", ".join(EXPORT.findall(source))
        source = EXPORT.sub("", IMPORT.sub(r'const \1 = modules["\2"];', source))
        assert not re.search(r"^(import|export)\b|</script", source, re.MULTILINE), f"{name}.js cannot be joined"
        parts += [f'modules["{name}"] = (() => {{', source.rstrip("\n"), f"return {{{names}}};", "})();"]
    return "\n".join([*parts, "})();"])


def script_source(script: str) -> str:
    """How a Content-Security-Policy names it.

    >>> script_source("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
