"""The Grafana dashboard: every expression is about metrics that there are, with labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shoal.core.report import EngineStatus
from shoal.obs.metrics import EngineMetrics, FrontMetrics

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
SCRAPED = {"instance", "job"}  # labels that Prometheus adds


def real_samples() -> dict[str, set[str]]:
    """Every sample's name → its labels."""
    front = FrontMetrics()
    front.count("/v1/completions", 200)
    found: dict[str, set[str]] = {}
    engine = EngineMetrics({"order": "slo"}, ["suffix"])
    for promise in ("ttft", "itl"):
        engine.promises["premium", promise, "yes"] += 1
    for family in text_string_to_metric_families(
        (engine.render() + front.render(0, [EngineStatus(0, True, 0)])).decode()
    ):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]


def test_every_expression_uses_metrics_and_labels_that_there_are() -> None:
    samples = real_samples()
    for expression in expressions():
        names = re.findall(r"\bshoal_\w+", expression)
        assert names, expression
        for name in names:
            assert name in samples, f"there is no {name}: {expression}"
        labels = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
        labels |= set(re.findall(r"[{,]\s*(\w+)\s*=", expression))
        assert labels <= SCRAPED.union(*(samples[name] for name in names)), expression
        assert expression.count("(") == expression.count(")"), expression


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"] or " by " not in target["expr"], target
                assert "sum(" not in target["expr"], f"a sum has no label {label}: {target['expr']}"


def test_every_kind_of_metric_that_people_watch_is_there() -> None:
    shown = set(re.findall(r"\bshoal_\w+", " ".join(expressions())))
    for name in ("time_to_first_token", "inter_token", "queue", "kv_use", "requests_rejected", "engine_restarts"):
        assert any(name in one for one in shown), name


def test_panels_have_names_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    for of in ("id", "title"):
        assert len({panel[of] for panel in panels}) == len(panels)
    taken = [(p["gridPos"]["x"] // 8, p["gridPos"]["y"] // 8) for p in panels]
    assert len(set(taken)) == len(panels)


def test_panels_say_all_that_the_schema_of_timeseries_demands() -> None:
    for panel in DASHBOARD["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["options"].keys() == {"legend", "tooltip"}
        assert panel["options"]["legend"].keys() == {"showLegend", "displayMode", "placement", "calcs"}
        assert panel["options"]["tooltip"].keys() == {"mode", "sort"}


def test_the_docs_name_only_metrics_that_there_are() -> None:
    samples = real_samples()
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in samples} | set(samples)
    for name in ("operations.md", "metrics.md"):
        text = (Path(__file__).parents[2] / "docs" / name).read_text()
        for metric in re.findall(r"\bshoal_\w+", text):
            assert metric in families, f"docs/{name} names {metric}, which does not exist"
