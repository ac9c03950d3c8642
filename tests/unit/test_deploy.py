"""What is deployed fits together: files that are mounted exist, commands parse, the board shows metrics that there are.

The compose file itself is not started here: that needs a container engine.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.recipes.cli import _parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/pipeline.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
OURS = re.compile(r"\brolltape_\w+")


def own_services() -> list[str]:
    return [name for name, service in SERVICES.items() if service["image"] == "rolltape:local"]


def expressions() -> dict[str, str]:
    """Every PromQL expression of the board and of the alerts, by where it stands."""
    found = {f"{panel['title']} {t['refId']}": t["expr"] for panel in PANELS for t in panel["targets"]}
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def metric_names() -> set[str]:
    """Names of what the sink's endpoint shows; of histograms without their suffixes."""
    families = SinkMetrics().registry.collect()
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def series_names() -> set[str]:
    """Names of the series that the sink's endpoint can show."""
    found = metric_names()
    return found | {f"{name}_{suffix}" for name in found for suffix in ("bucket", "sum", "count")}


# The compose file.


@pytest.mark.parametrize("name", [name for name in own_services() if "entrypoint" not in SERVICES[name]])
def test_commands_of_the_compose_file_parse(name: str) -> None:
    words = [str(word) for word in SERVICES[name]["command"]]
    assert _parser(words[0]).parse_args(words).command == words[0]


def test_own_services_run_the_image_that_is_built_here() -> None:
    assert set(own_services()) == {"topics", "bucket", "sink"}
    for name in own_services():
        assert SERVICES[name]["build"]["dockerfile"] == "deploy/Dockerfile"


def test_other_images_are_pinned() -> None:
    others = [service["image"] for service in SERVICES.values() if service["image"] != "rolltape:local"]
    assert all(re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", image) for image in others), others


def test_everything_waits_for_services_that_there_are() -> None:
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            assert name in SERVICES
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_ports_are_open_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(str(port).startswith("127.0.0.1:") for port in ports)


def test_the_example_environment_names_every_secret_and_holds_none() -> None:
    asked = set(re.findall(r"\$\{(\w+):\?", (ROOT / "compose.yaml").read_text()))
    lines = [line for line in (DEPLOY / "example.env").read_text().splitlines() if line and not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    assert asked == set(given)
    assert not any(value for name, value in given.items() if "SECRET" in name or "PASSWORD" in name)


def test_the_image_copies_what_there_is() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]]
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert set(sources) == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_sinks_are_scraped_where_they_listen() -> None:
    (job,) = [
        job
        for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "sink"
    ]
    (found,) = job["dns_sd_configs"]
    command = [str(word) for word in SERVICES["sink"]["command"]]
    assert found["names"] == ["sink"]
    assert str(found["port"]) == dict(pairwise(command))["--metrics-port"]


# The board and the alerts.


@pytest.mark.parametrize(("place", "expression"), expressions().items())
def test_the_board_and_the_alerts_use_metrics_that_there_are(place: str, expression: str) -> None:
    assert set(OURS.findall(expression)) <= series_names()
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_every_metric_of_the_sink_is_on_the_board() -> None:
    shown = {name for expression in expressions().values() for name in OURS.findall(expression)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert metric_names() <= shown | families


def test_panels_have_names_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)


def test_panels_ask_the_data_source_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/rolltape.yaml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/pipeline.json"


def test_every_alert_says_what_it_means() -> None:
    rules = [r for g in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for r in g["rules"]]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in {"page", "ticket"} for rule in rules)
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in page] == []
