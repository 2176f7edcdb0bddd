"""Asks a server for /health again and again: `python -m shoal.bench.health_probe HOST PORT`.

A process of its own, so that its figures are not disturbed by what its parent computes. Prints one line per answer:
when it was asked (monotonic clock) and how long the answer took, in seconds. Ends when its standard input is closed.
"""

import http.client
import select
import sys
import time

PAUSE_S = 0.005
LIMIT_S = 300.0


def main(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        began_s = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
        print(f"{began_s:.6f} {time.monotonic() - began_s:.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
