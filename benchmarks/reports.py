"""Makes the published reports and pictures of real runs again, on a quiet machine.

    python -m benchmarks.reports [--only timeline,giant] [--traces DIR] [--root DIR]

Each report is made in a folder of its own and copied into docs/ only if other programs took less than 5% of the CPUs in
each of its runs; else it says so and leaves what is published as it is. The tables that it prints belong into the page
named with them. A report that is kept unfinished by an interrupt goes on when it is started again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.cpu_noise import Noise
from shoal.core.names import pick

LENGTHS = ("--prompt-scale", "0.03125", "--output-scale", "0.08333")


@dataclass(frozen=True)
class Report:
    """A command of shoal, which files of it are published where, and the page that has its figures."""

    command: tuple[str, ...]
    into: str
    files: tuple[str, ...]
    page: str
    minutes: int  # on two cores


def azure(trace: str, prompts: str, outputs: str) -> tuple[str, ...]:
    scales = ("--prompt-scale", prompts, "--output-scale", outputs)
    return ("compare", "--trace", trace, *scales, "--rates", "4,12,24", "--requests", "120", "--repeats", "2")


WHOLE = ("report.md", "results.json", "*.png")
REPORTS = {
    "timeline": Report(("compare", "--rates", "8", *LENGTHS), "docs/img", ("timeline.png",), "README.md", 5),
    "giant": Report(("bench", "giant"), "docs/img", ("giant.png",), "docs/batching.md", 1),
    "policies": Report(
        ("bench", "policies", "--ttft", "1", "--itl", "0.15", "--burst-trace", "azure_code_2023.csv.gz"),
        "docs/reports/policies", ("policies.json", "*.png"), "docs/policies.md", 12,
    ),
    "azure-chat": Report(
        azure("azure_conv_2023.csv.gz", "0.015625", "0.025"), "docs/reports/azure-chat", WHOLE, "docs/batching.md", 15
    ),
    "azure-code": Report(
        azure("azure_code_2023.csv.gz", "0.0078125", "0.1"), "docs/reports/azure-code", WHOLE, "docs/batching.md", 15
    ),
}  # fmt: skip


def make(name: str, root: Path, traces: Path, work: Path) -> bool:
    """Whether the report was quiet enough, and is published."""
    report, folder = REPORTS[name], work / name
    command = [str(traces / word) if word.endswith(".csv.gz") else word for word in report.command]
    print(f"{name}: about {report.minutes} minutes; figures for {report.page}", flush=True)
    subprocess.run([sys.executable, "-m", "shoal", *command, "--out", str(folder)], check=True)
    loud = [one for one in noises(folder) if one.disturbs]
    if loud:
        most = max(one.share for one in loud)
        print(f"{name} is not published: others took up to {most:.0%} of the CPUs; make it again on a quiet machine")
        return False
    for pattern in report.files:
        for file in folder.glob(pattern):
            publish(file, root / report.into / file.name, (traces, work))
    return True


def publish(file: Path, to: Path, folders: Iterable[Path]) -> None:
    """A copy; commands in its text name files without the folders they lie in here."""
    if file.suffix == ".png":
        shutil.copy(file, to)
        return
    text = file.read_text()
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    to.write_text(text)


def noises(folder: Path) -> Iterator[Noise]:
    """What other programs took in each run that the folder tells of."""
    for file in folder.glob("*.json"):
        yield from found_in(json.loads(file.read_text()))


def found_in(value: Any) -> Iterator[Noise]:
    """
    >>> [one.share for one in found_in({"runs": [{"others": 0.2, "stolen": 0.1}, {"others": None}]})]
    [0.30000000000000004]
    """
    if isinstance(value, dict):
        if isinstance(value.get("others"), float):
            yield Noise(value["others"], value.get("stolen") or 0.0)
        for inner in value.values():
            yield from found_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from found_in(inner)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(REPORTS), metavar="NAMES", help=f"some of: {', '.join(REPORTS)}")
    parser.add_argument("--traces", type=Path, default=Path(), metavar="DIR", help="folder of the Azure traces")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], metavar="DIR", help="the project")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "shoal-reports", metavar="DIR")
    args = parser.parse_args()
    names = args.only.split(",")
    for name in names:
        pick(REPORTS, name, "report")
    args.work.mkdir(parents=True, exist_ok=True)
    done = [make(name, args.root, args.traces, args.work) for name in names]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
