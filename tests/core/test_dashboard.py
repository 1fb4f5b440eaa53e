"""The Grafana dashboard asks for metrics that exist, with labels that they have, and leaves none out."""

import json
import re
from pathlib import Path

import pytest

from server_ext.core import metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana/bidikv.json").read_text())
METRICS = {metric.name: metric for metric in metrics.ALL}
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
# What Prometheus adds to every series, and to those of a histogram.
ADDED_LABELS = {"instance", "le"}


def metrics_of(expr):
    """Return the definitions of the metrics in a query."""
    found = re.findall(r"bidikv_\w+", expr)
    return [METRICS.get(name) or METRICS[re.sub(r"_(bucket|sum|count)$", "", name)] for name in found]


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_names_metrics_and_labels_that_exist(expr):
    """Every metric of a query is served, counters are asked for their rate, and every label is one of theirs."""
    asked = metrics_of(expr)
    assert asked
    labels = set(re.findall(r"(\w+)=~?\"", expr))
    for group in re.findall(r"by \(([^)]*)\)", expr):
        labels.update(label.strip() for label in group.split(","))
    assert labels <= ADDED_LABELS.union(*(metric.labels for metric in asked))
    if any(metric.kind == "histogram" for metric in asked):
        assert "histogram_quantile" in expr
    for label, values in re.findall(r"(\w+)=~?\"([\w|]+)\"", expr):
        known = {value for metric in asked if label in metric.labels for (value,) in metric.known}
        assert set(values.split("|")) <= known


def test_every_metric_is_on_the_dashboard():
    """What is measured can be seen."""
    shown = {metric.name for query in QUERIES for metric in metrics_of(query.values[0])}
    assert shown == set(METRICS)


def test_legends_name_labels_of_their_query():
    """A legend's label is one that the query groups by."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            grouped = {
                label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped


def test_panels_do_not_overlap():
    """Panels have ids and places of their own."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
