"""The Dockerfile, the systemd unit and the Kubernetes manifest: what can be checked without docker, systemd or a
cluster. Where docker is installed, the image is built, too (slow)."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Every instruction of the Dockerfile, on one line."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_runs_as_a_user_without_rights() -> None:
    found = instructions()
    known = {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {name for name, _ in found} <= known | {"ENTRYPOINT", "CMD"}
    names = [name for name, _ in found]
    assert names[0] == "FROM"
    users = [int(rest) for name, rest in found if name == "USER"]
    assert users[-1] >= 1000
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "nothing is installed as that user"


def test_the_image_is_pinned_and_small() -> None:
    for name, rest in instructions():
        if name == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim-\w+", rest)
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
        for install in re.findall(r"pip install ([^;&]*)", rest):
            assert "--no-cache-dir" in install
            assert "-c constraints.txt" in install or "==" in install


def test_what_the_image_copies_is_there() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, rest in instructions():
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed


def test_the_image_starts_a_server_that_it_can_ask() -> None:
    found = dict(instructions())
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
