"""Every field that docs/api.md calls taken has a check of what it does, and every check passes."""

from collections.abc import Iterator

import pytest

from shoal.server.compat import DIFFERS, TAKEN, fields_of
from shoal.server.other_servers import FIELDS
from tests.fields import apart, drawing, ends, forms, generate, prompts, shown
from tests.fields.registry import CHECKS, Check, runs
from tests.fields.server import FieldServer, field_server

MODULES = (apart, drawing, ends, forms, generate, prompts, shown)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FieldServer]:
    with field_server(tmp_path_factory.mktemp("fields")) as made:
        yield made


def test_every_field_that_is_taken_is_checked() -> None:
    taken = {(path, one.name) for path in FIELDS for one in fields_of(path) if one.status in (TAKEN, DIFFERS)}
    assert not (missing := sorted(taken - CHECKS.keys())), f"without a check: {missing}"
    assert not (gone := sorted(CHECKS.keys() - taken)), f"not taken, or not a field: {gone}"


@pytest.mark.parametrize(("check", "path"), runs(), ids=lambda one: getattr(one, "__name__", str(one).strip("/")))
def test_a_field_does_what_it_says(server: FieldServer, check: Check, path: str) -> None:
    assert check.__module__ in {module.__name__ for module in MODULES}
    check(server, path)
