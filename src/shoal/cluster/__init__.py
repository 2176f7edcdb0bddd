"""Engines on several machines, on Ray: placement, restarts, autoscaling. The only room that imports ray.

`shoal serve --cluster ray` starts the fleet (fleet.py), a process beside the fronts. Importing this package does not
load ray.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`shoal.cluster:app`, the application for Ray Serve, loaded when it is asked for."""
    if name == "app":
        from shoal.cluster.serving import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
