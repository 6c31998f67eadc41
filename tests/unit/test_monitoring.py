"""Alerts and the Grafana dashboard: what they ask for exists, and Prometheus' own tool agrees."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import needs

from conquiet.cli.settings import SETTINGS
from conquiet.middleware.metrics import METRICS
from conquiet.relay.metrics import METRICS as OF_RELAYS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "conquiet.json"

KNOWN = {metric.name: metric for metric in (*METRICS, *OF_RELAYS)}
SERIES = {
    name: set(metric.labels) | ({"le"} if suffix == "_bucket" else set())
    for metric in KNOWN.values()
    for suffix in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
    for name in (metric.name + suffix,)
}


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    return list(json.loads(DASHBOARD.read_text())["panels"])


def expressions() -> list[str]:
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + asked


@pytest.mark.parametrize("text", expressions())
def test_a_metric_that_is_asked_for_exists_with_its_labels(text: str) -> None:
    named = re.findall(r"conquiet_\w+", text)
    assert named
    assert set(named) <= set(SERIES)
    labels = set.union(*(SERIES[name] for name in named))
    for group in re.findall(r"by \(([^)]*)\)", text):
        assert {label.strip() for label in group.split(",")} <= labels
    for name, chosen in re.findall(r"(conquiet_\w+)\{([^}]*)\}", text):
        assert set(re.findall(r"(\w+)\s*[=!]", chosen)) <= SERIES[name]


def test_counters_are_asked_for_their_change() -> None:
    for text in expressions():
        for name in re.findall(r"conquiet_\w+_total", text):
            assert re.search(rf"(rate|increase)\({name}", text), text


def test_every_metric_is_on_the_dashboard_but_the_size_of_batches_and_two_of_relays() -> None:
    shown = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in KNOWN
        if name in target["expr"]
    }
    assert set(KNOWN) - shown == {
        "conquiet_batch_size",
        "conquiet_relay_attempts",
        "conquiet_relay_outages_total",
        "conquiet_relay_slot_lag_bytes",
    }


def test_panels_of_the_dashboard_have_a_unit_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_alerts_say_what_happened_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize(
    "arguments", [["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]]
)
def test_promtool_accepts_the_rules(arguments: list[str]) -> None:
    program = shutil.which("promtool")
    if program is None:
        needs.missing("promtool", "apt-get install --no-install-recommends prometheus")
    done = subprocess.run(
        [program, *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        needs.missing("promtool", "apt-get install --no-install-recommends prometheus")
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    recorded = [
        {"record": f"panel:{at}", "expr": text.replace("$__rate_interval", "5m")}
        for at, text in enumerate(asked)
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run([program, "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


DOCS = DEPLOY.parent / "docs"


def test_the_docs_list_the_metrics_of_workers() -> None:
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.meaning} |"
        for m in METRICS
    ]
    assert "\n".join(rows) in (DOCS / "middlewares.md").read_text()


def test_the_docs_list_the_settings_of_workers() -> None:
    rows = [
        f"| `{s.variable}` | `{s.flag}`, `{s.name}` | {f'`{s.default}`' if s.default else ''}"
        f" | {s.allowed} | {s.meaning} |"
        for s in SETTINGS
    ]
    assert "\n".join(rows) in (DOCS / "cli.md").read_text()
