"""Containers and the service of a site name files, stages and commands that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlayers.cli.federation import Federate, Site, Superlink
from fedlayers.cli.main import parse_command
from fedlayers.remote.site_config import SiteFile

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
UNIT = (DEPLOY / "fedlayers-site.service").read_text(encoding="utf-8")
LINES = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    if line.strip() and not line.startswith("#")
]


def stages() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in LINES:
        if line[0] == "FROM":
            found[line[1].split(" AS ")[1]] = []
        else:
            list(found.values())[-1].append(line)
    return found


def test_the_dockerfile_copies_what_there_is_and_its_ignore_file_lets_it_pass() -> None:
    copied = [name for word, rest in LINES if word == "COPY" for name in rest.split()[:-1]]
    passed = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(passed)
    assert all((ROOT / name).exists() for name in copied)
    installed = [rest for word, rest in LINES if word == "RUN"]
    assert {name for line in installed for name in re.findall(r"[\w-]+\.(?:lock|txt)", line)} <= set(copied)
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("stage", "command"), [("site", Site), ("server", Superlink)])
def test_an_image_s_own_command_is_one_of_the_program(stage: str, command: type) -> None:
    found = dict(stages()[stage])
    assert json.loads(found["ENTRYPOINT"]) == ["fedlayers"]
    assert isinstance(parse_command(json.loads(found["CMD"])), command)
    assert found["USER"] == "fedlayers"


def test_the_services_of_compose_have_stages_and_commands_that_there_are() -> None:
    kinds = {"superlink": Superlink, "north": Site, "south": Site, "run": Federate}
    for name, service in COMPOSE["services"].items():
        command = parse_command(service["command"])
        assert isinstance(command, kinds.pop(name))
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        assert service["build"]["target"] in stages()
        (workdir,) = (rest for word, rest in stages()[service["build"]["target"]] if word == "WORKDIR")
        for volume in service["volumes"]:  # what a command reads and writes lies in a volume
            assert volume.split(":")[1].startswith(workdir)
        if isinstance(command, Federate):
            assert command.network.superlink == SiteFile.read(DEPLOY / "site.toml").connection["superlink"]
    assert not kinds


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="there is no docker-compose")
def test_compose_takes_its_file() -> None:
    words = ["docker-compose", "-f", str(DEPLOY / "compose.yaml"), "--profile", "run", "config", "--quiet"]
    assert subprocess.run(words, capture_output=True, text=True).stderr == ""


def test_the_service_starts_a_site() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, *words = shlex.split(line)
    assert Path(program).name == "fedlayers"
    assert isinstance(parse_command(words), Site)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "fedlayers-site.service"
    unit.write_text(re.sub("/opt/fedlayers/bin/fedlayers", sys.executable, UNIT))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
