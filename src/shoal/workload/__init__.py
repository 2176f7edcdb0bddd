"""Workloads: requests to run, as lengths and arrival times. No engine, no torch."""
