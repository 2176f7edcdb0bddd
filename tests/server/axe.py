"""axe-core, a checker of accessibility, run in a tab."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.server.chromium import Tab

LOOKS = [  # each width and each set of colours in `make test`, and all pairs in `make test-all`
    pytest.param(1280, False, id="desk-light"),
    pytest.param(360, True, id="phone-dark"),
    pytest.param(1280, True, id="desk-dark", marks=pytest.mark.slow),
    pytest.param(360, False, id="phone-light", marks=pytest.mark.slow),
]
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
