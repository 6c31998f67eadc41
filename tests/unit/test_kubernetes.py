"""The manifests of deploy/kubernetes: they parse, fit together, and run commands that exist."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from conquiet.cli import build_parser
from conquiet.cli.settings import SETTINGS as OF_WORKER
from conquiet.config import Url
from conquiet.health import Health
from conquiet.relay.settings import SETTINGS
from conquiet.web import Token, dashboard
from conquiet.web.settings import SETTINGS as OF_DASHBOARD

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
TOKEN = "CONQUIET_DASHBOARD_TOKEN"  # a secret, and so no setting that is shown


def documents() -> list[dict[str, Any]]:
    return [found for path in FILES for found in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in documents() if found["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    return {
        name: found["spec"]["template"]["spec"]
        for kind in ("Deployment", "Job")
        for name, found in of_kind(kind).items()
    }


def containers() -> dict[str, dict[str, Any]]:
    """Each pod has one."""
    return {name: container for name, pod in pods().items() for container in pod["containers"]}


SCHEMAS = """
import sys, yaml, kubernetes_validate
for path in sys.argv[2:]:
    for found in yaml.safe_load_all(open(path)):
        if found["kind"] != "ScaledObject":  # of KEDA, not of Kubernetes
            print(found["kind"], kubernetes_validate.validate(found, sys.argv[1], strict=True))
"""


def validate(folder: Path, version: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCHEMAS, version, *map(str, files)]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.mark.slow  # its schemas are 17,000 files
@pytest.mark.timeout(300)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """By kubernetes-validate, since kubeconform is in no index of packages."""
    folder = tmp_path / "packages"
    options = ["--quiet", "--disable-pip-version-check", "--target", str(folder)]
    options += ["--constraint", str(FOLDER.parents[1] / "constraints.txt"), "kubernetes-validate"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    for version in ("1.25", "1.37"):
        done = validate(folder, version, *FILES)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == len(documents()) - len(of_kind("ScaledObject"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / "relay.yaml").read_text().replace("readinessProbe", "readyProbe"))
    assert "readyProbe" in validate(folder, "1.37", wrong).stderr


def test_there_is_a_manifest_for_each_process() -> None:
    assert {name.removeprefix("conquiet-") for name in containers()} == {
        "dashboard",
        "migrate",
        "relay",
        "worker",
    }


@pytest.mark.parametrize("name", containers())
def test_a_command_is_one_of_conquiet(name: str) -> None:
    program, *arguments = containers()[name]["command"]
    assert program == "conquiet"
    assert callable(build_parser().parse_args(arguments).run)


def test_a_deployment_selects_its_own_pods() -> None:
    for found in of_kind("Deployment").values():
        assert found["apiVersion"] == "apps/v1"
        wanted = found["spec"]["selector"]["matchLabels"].items()
        assert wanted <= found["spec"]["template"]["metadata"]["labels"].items()


def test_a_service_finds_its_pods_and_their_port() -> None:
    for service in of_kind("Service").values():
        [pod] = [
            found["spec"]["template"]
            for found in of_kind("Deployment").values()
            if service["spec"]["selector"].items()
            <= found["spec"]["template"]["metadata"]["labels"].items()
        ]
        named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


@pytest.mark.parametrize("probe", ["livenessProbe", "readinessProbe"])
@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("conquiet-relay", "CONQUIET_OUTBOX_HEALTH"),
        ("conquiet-worker", "CONQUIET_WORKER_HEALTH"),
    ],
)
def test_relay_and_worker_answer_their_probes(name: str, variable: str, probe: str) -> None:
    found = containers()[name]
    asked = found[probe]["httpGet"]
    [port] = [port for port in found["ports"] if port["name"] == asked["port"]]
    [where] = [item["value"] for item in found["env"] if item["name"] == variable]
    scraped = of_kind("Deployment")[name]["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/port"] == str(port["containerPort"])
    assert where == f"0.0.0.0:{port['containerPort']}"  # the kubelet asks from outside
    health = Health({}, alive=lambda: None, metrics=lambda: b"")
    assert health.respond(asked["path"])[0] == 200


def test_the_dashboard_answers_its_probe_at_the_address_of_a_pod() -> None:
    asked = containers()["conquiet-dashboard"]["readinessProbe"]["httpGet"]
    app = dashboard(broker="redis://127.0.0.1:1/0", auth=Token("t" * 20), allowed_hosts=["ops.me"])

    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask(asked["path"])) == 200
    assert asyncio.run(ask("/login")) == 400
    app.close()


def test_a_relay_has_time_to_finish_its_batch() -> None:
    [grace] = [setting.default for setting in SETTINGS if setting.name == "grace_seconds"]
    assert pods()["conquiet-relay"]["terminationGracePeriodSeconds"] > int(grace)


def test_secrets_and_settings_that_are_named_exist() -> None:
    for container in containers().values():
        for source in container["envFrom"]:
            if "secretRef" in source:
                assert source["secretRef"]["name"] in of_kind("Secret")
            else:
                assert source["configMapRef"]["name"] in of_kind("ConfigMap")
        for item in container.get("env", []):
            if "valueFrom" in item:
                key = item["valueFrom"]["secretKeyRef"]
                assert key["key"] in of_kind("Secret")[key["name"]]["stringData"]


def test_variables_are_settings() -> None:
    known = {setting.variable for setting in (*SETTINGS, *OF_WORKER, *OF_DASHBOARD)} | {TOKEN}
    used = {name for path in FILES for name in re.findall(r"CONQUIET_[A-Z_]+", path.read_text())}
    assert used <= known


def test_keda_scales_the_worker_by_the_group_that_it_reads() -> None:
    [scaled] = of_kind("ScaledObject").values()
    target = scaled["spec"]["scaleTargetRef"]["name"]
    command = containers()[target]["command"]
    source = Url(command[command.index("--source") + 1])
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["type"] == "redis-streams"
    names = {
        "address",
        "stream",
        "consumerGroup",
        "lagCount",
        "activationLagCount",
        "databaseIndex",
    }
    assert trigger["metadata"].keys() <= names  # of those that KEDA documents
    assert trigger["metadata"]["stream"] == source.text("stream")
    assert trigger["metadata"]["consumerGroup"] == source.text("group")
    assert all(
        isinstance(value, str) for value in trigger["metadata"].values()
    )  # else KEDA refuses
    broker = urlsplit(of_kind("Secret")["conquiet"]["stringData"]["CONQUIET_BROKER_URL"])
    assert trigger["metadata"]["address"] == broker.netloc
    assert scaled["spec"]["minReplicaCount"] <= scaled["spec"]["maxReplicaCount"]
