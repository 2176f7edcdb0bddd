"""A linter for Dockerfiles, for machines without docker: the rules of hadolint that matter for an image like ours.

Reads instructions and returns what is wrong with them, by hadolint's names. Runs nothing but `bash -n`.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator

Instruction = tuple[str, str]  # its name, and the rest on one line
Rule = Callable[[list[Instruction]], Iterator[str]]
KNOWN = {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "ADD", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "LABEL"}
KNOWN |= {"ENTRYPOINT", "CMD", "SHELL", "VOLUME"}


def instructions(text: str) -> list[Instruction]:
    """Every instruction, on one line."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.strip().partition(" ") for line in lines)]


def of(found: list[Instruction], name: str) -> list[str]:
    return [rest for one, rest in found if one == name]


def unknown(found: list[Instruction]) -> Iterator[str]:
    yield from (f"there is no instruction {name}" for name, _ in found if name not in KNOWN)


def base_pinned(found: list[Instruction]) -> Iterator[str]:
    for rest in of(found, "FROM"):
        image = rest.split()[0]
        if ":" not in image or image.endswith(":latest"):
            yield f"{image} has no fixed tag"


def user(found: list[Instruction]) -> Iterator[str]:
    users = of(found, "USER")
    if not users or users[-1].split(":")[0] in ("root", "0"):
        yield "the last user is root"


def workdir(found: list[Instruction]) -> Iterator[str]:
    yield from (f"WORKDIR {rest} is not absolute" for rest in of(found, "WORKDIR") if not rest.startswith(("/", "$")))
    yield from (f"use WORKDIR, not cd: {rest}" for rest in of(found, "RUN") if re.search(r"(^|[;&] *)cd ", rest))


def programs(found: list[Instruction]) -> Iterator[str]:
    for rest in of(found, "RUN"):
        for name in re.findall(r"(?:^|[;&|] *)(sudo|ssh|vim|apt|wget|top|kill|mount)\b(?!-)", rest):
            yield f"{name} does not belong into an image"


def apt(found: list[Instruction]) -> Iterator[str]:
    for rest in of(found, "RUN"):
        if "apt-get install" not in rest:
            continue
        for wanted in ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists"):
            if wanted not in rest:
                yield f"apt-get install without {wanted}"
        if not re.search(r"install [^&;]*(--yes|-y)\b", rest):
            yield "apt-get install asks a question; give --yes"


def pip(found: list[Instruction]) -> Iterator[str]:
    for rest in of(found, "RUN"):
        for install in re.findall(r"pip install ([^;&]*)", rest):
            if "--no-cache-dir" not in install:
                yield f"pip keeps a cache: {install}"
            if not re.search(r"-c \S+|-r \S+|==", install):
                yield f"pip installs what is newest: {install}"


def copies(found: list[Instruction]) -> Iterator[str]:
    yield from (f"ADD {rest}: use COPY" for rest in of(found, "ADD"))
    inside = False
    for name, rest in found:
        inside = (inside or name == "WORKDIR") and name != "FROM"
        *sources, target = [word for word in rest.split() if not word.startswith("--")] if name == "COPY" else ["/"]
        if len(sources) > 1 and not target.endswith("/"):
            yield f"COPY of several needs a folder that ends with /, not {target}"
        if name == "COPY" and not inside and not target.startswith("/"):
            yield f"COPY to {target} without a WORKDIR"


def commands(found: list[Instruction]) -> Iterator[str]:
    for name in ("ENTRYPOINT", "CMD"):
        if len(of(found, name)) > 1:
            yield f"{name} twice: only the last counts"
        for rest in of(found, name):
            try:
                json.loads(rest)
            except ValueError:
                yield f"{name} {rest}: write it as a JSON list, so that signals reach the program"


def shell(found: list[Instruction]) -> Iterator[str]:
    piped = any("pipefail" in rest for rest in of(found, "SHELL"))
    for rest in of(found, "RUN"):
        done = subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{rest}: {done.stderr.strip()}"
        if re.search(r"[^|]\|[^|]", rest) and not piped:
            yield f"a pipe hides errors without pipefail: {rest}"


def ports(found: list[Instruction]) -> Iterator[str]:
    for rest in of(found, "EXPOSE"):
        yield from (f"no port: {one}" for one in rest.split() if not 0 < int(one.split("/")[0]) < 2**16)


RULES: dict[str, Rule] = {
    "DL1000": unknown, "DL3006": base_pinned, "DL3002": user, "DL3000": workdir, "DL3001": programs, "DL3008": apt,
    "DL3013": pip, "DL3020": copies, "DL3025": commands, "DL4006": shell, "DL3011": ports,
}  # fmt: skip


def lint(text: str) -> list[str]:
    """What is wrong, each with its rule's name."""
    found = instructions(text)
    return [f"{name}: {problem}" for name, rule in RULES.items() for problem in rule(found)]
