"""Engines on several machines, on Ray: placement, restarts, autoscaling. The only room that imports ray.

`shoal serve --cluster ray` starts the fleet (fleet.py), a process beside the fronts. Importing this package does not
load ray.
"""
