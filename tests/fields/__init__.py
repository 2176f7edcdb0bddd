"""What each field that docs/api.md calls taken does, on a real engine in this process.

registry.py     which check belongs to which fields of which endpoints
server.py       a front over an engine with a tiny random model, in this process
drawing.py …    the checks, by kind
test_fields.py  runs them all, and fails where a field has none
"""

import pytest

CHECKS = ("drawing", "ends", "forms", "prompts", "shown", "apart", "generate")
pytest.register_assert_rewrite(*(f"tests.fields.{name}" for name in ("server", *CHECKS)))
