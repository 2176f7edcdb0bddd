"""Paths of the real traces, on a machine that has them."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"
AZURE_CONV = DATA / "azure_conv_2023.csv.gz"
AZURE_CODE = DATA / "azure_code_2023.csv.gz"
MOONCAKE = DATA / "mooncake_conversation.jsonl.gz"


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"{path.name} is not here")
