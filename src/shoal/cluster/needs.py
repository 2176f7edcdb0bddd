"""What one engine needs of a node: cores and GPUs.

Owns the defaults, which follow from the device and the nodes that there are. Knows no ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Needs:
    """What one engine needs of a node."""

    cpus: int | None = None  # None: a GPU's engine 1, others all cores of the smallest node
    gpus: int | None = None  # None: 1 where the cluster has some, unless the device is the CPU

    def resolved(self, device: str, nodes: list[Mapping[str, Any]]) -> "Needs":
        """With numbers for what was left open, and checked against the nodes.

        >>> nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0}]
        >>> Needs().resolved("auto", nodes), Needs().resolved("cpu", nodes)
        (Needs(cpus=1, gpus=1), Needs(cpus=4, gpus=0))
        """
        has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
        gpus = self.gpus if self.gpus is not None else int(device != "cpu" and has_gpus)
        cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        cpus = self.cpus if self.cpus is not None else 1 if gpus else min(cores, default=1)
        return replace(self, cpus=cpus, gpus=gpus)

    @property
    def bundle(self) -> dict[str, float]:
        found = {"CPU": float(self.cpus or 0), "GPU": float(self.gpus or 0)}
        return {name: amount for name, amount in found.items() if amount}

    def __str__(self) -> str:
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
