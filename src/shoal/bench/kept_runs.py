"""Runs of a comparison that was interrupted: written as each ends, found again by the same command.

Owns the files. A run belongs to a comparison by a key over everything that its figures depend on. Knows no engine.
"""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.bench.cpu_noise import Noise
from shoal.bench.record import PassRecord, RequestRecord, RunRecord
from shoal.core.work import ModelWork


class NothingKept:
    """Every run is made anew."""

    def find(self, label: str, rate: float) -> RunRecord | None:
        return None

    def add(self, run: RunRecord) -> None:
        pass


class KeptRuns(NothingKept):
    """Runs in a folder."""

    def __init__(self, folder: Path, about: Any) -> None:
        """`about`: everything that the figures depend on, as JSON."""
        self.folder = folder
        self.key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def _path(self, label: str, rate: float) -> Path:
        name = hashlib.sha256(f"{self.key} {label} {rate!r}".encode()).hexdigest()[:24]
        return self.folder / f"{name}.json"

    def find(self, label: str, rate: float) -> RunRecord | None:
        try:
            return as_run(json.loads(self._path(label, rate).read_text()))
        except (OSError, ValueError, TypeError, KeyError):  # not there, or cut off in the middle of writing
            return None

    def add(self, run: RunRecord) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(run.label, run.rate)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(run), default=float))
        new.replace(path)

    def clear(self) -> None:
        """The report is written: the next comparison begins anew."""
        shutil.rmtree(self.folder, ignore_errors=True)


def as_run(values: dict[str, Any]) -> RunRecord:
    """The inverse of asdict()."""
    requests = [RequestRecord(**one) for one in values["requests"]]
    passes = [
        PassRecord(**{**one, "rows": tuple(map(tuple, one["rows"])), "late": tuple(one["late"])})
        for one in values["passes"]
    ]
    noise = None if values["noise"] is None else Noise(**values["noise"])
    parts = {"requests": requests, "passes": passes, "noise": noise, "work": ModelWork(**values["work"])}
    return RunRecord(**{**values, **parts, "rates": None})  # the machine is measured by each start
