"""A rank that computes nothing: the real line to rank 0, and answers that a test asks for."""

import json
import os
import sys

from shoal.errors import BadConfig
from shoal.processes.rank import Line


def main() -> None:
    config = json.load(sys.stdin)
    if config["dies_with_parent"]:
        from shoal.engine.supervise import die_with_parent

        die_with_parent()
    line = Line(config["socket_fd"])
    line.tell({"pid": os.getpid(), "rank": config["rank"], "given": config["given"]})
    passes = []
    while True:
        kind, data = line.next()
        if kind == b"p":
            passes.append(data)
            continue
        asked = json.loads(data)
        if asked["what"] == "passes":
            line.tell({"passes": [one.decode() for one in passes]})
        elif asked["what"] == "refuse":
            error = BadConfig("too many fish; catch fewer")
            line.tell({"error": type(error).__name__, "message": str(error)})
        elif asked["what"] == "fail" and asked["rank"] == config["rank"]:
            line.tell({"failed": "RuntimeError: out of water"})
            os._exit(1)


if __name__ == "__main__":
    main()
