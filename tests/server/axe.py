"""axe-core, a checker of accessibility, run in a tab."""

import gzip
from pathlib import Path
from typing import Any

from tests.server.chromium import Tab

AXE = Path(__file__).parent / "axe.min.js.gz"  # axe-core 4.14.0, MPL-2.0


def serious(tab: Tab) -> list[Any]:
    """Violations that axe-core calls serious or critical."""
    tab.run(gzip.decompress(AXE.read_bytes()).decode() + ";1")
    found = tab.run("axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)")
    return [
        (one["id"], one["help"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
