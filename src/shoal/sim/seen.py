"""What a running server has seen (GET /debug/passes), as a profile and a trace for the simulator.

Owns how the server's answer is read, and its errors. Costs are fitted as in a calibration; the load is the one that the
server had, so the profile knows no passes of other sizes. Copies are known where blocks were swapped; fronts are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig, UnknownName
from shoal.sim.cost import CopyCosts, PassSize
from shoal.sim.fit import ENOUGH, TimedPass, fit_costs
from shoal.sim.profile import FORMAT, Profile, read_values
from shoal.workload.traces import TraceRequest

Columns = Mapping[str, list[Any]]
PASS_COLUMNS = (
    *("busy_s", "between_s", "positions", "padded", "rows", "decodes", "lines", "reads", "pairs", "starting", "span"),
)
REQUEST_COLUMNS = ("arrived_s", "prompt", "cached", "output", "ttft_s", "e2e_s", "waited_s", "preemptions")


@dataclass(frozen=True)
class SeenEngine:
    """One engine of a server: what it is, and its latest passes and requests, column by column."""

    about: Mapping[str, Any]
    passes: Columns
    requests: Columns

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.about["settings"])

    @property
    def count(self) -> int:
        return len(self.passes["busy_s"])

    def config(self, **changes: Any) -> EngineConfig:
        """The engine's settings, with its own KV memory, and some of them changed."""
        kv_memory = self.about["kv_tokens"] * self.about["model"]["kv_token_bytes"]
        known = {**self.settings, "kv_memory": kv_memory, "model": None, "kv_share": None, "device": "auto"}
        # what a profile does not depend on or was measured with; what a preset says is in the settings
        for name in ("preset", "threads", "cpu_kernels", "load_format", "dtype", "quantization", "kv_dtype", "seed"):
            known.pop(name, None)
        sizes = {"max_num_seqs": self.about["places"], "max_num_batched_tokens": self.about["budget"]}
        return EngineConfig.from_mapping({**known, **sizes, "depth": self.about["depth"], **changes})


def read_seen(answer: Mapping[str, Any], where: str) -> list[SeenEngine]:
    """The engines of a server, from its answer."""
    found = []
    for one in answer.get("engines", ()):
        try:
            passes, requests = one["passes"], one["requests"]
            for table, names in ((passes, PASS_COLUMNS), (requests, REQUEST_COLUMNS)):
                if len({len(table[name]) for name in names}) != 1:
                    raise ValueError("columns of different lengths")
            seen = SeenEngine(one, passes, requests)
            seen.config()
        except (KeyError, TypeError, ValueError, UnknownName) as error:
            raise BadConfig(f"{where} is a server of another version: its passes cannot be read ({error})") from error
        found.append(seen)
    if not found:
        raise BadConfig(f"no engine of {where} answers; wait until one is up")
    return found


def timed_passes(seen: SeenEngine) -> list[TimedPass]:
    """Passes as a calibration records them. The host's time is visible where one pass is in flight.

    The padding of a ragged pass is that of a graph recorded for more positions: no plan shows it, so it is a part of
    what the pass took, and not of its size.
    """
    table, alone = seen.passes, seen.about["depth"] == 1
    ragged = seen.settings.get("layout", "ragged") == "ragged"
    found = []
    for index in range(seen.count):
        value = {name: table[name][index] for name in PASS_COLUMNS}
        if value["busy_s"] <= 0:
            continue
        padded = value["padded"]
        size = PassSize(
            value["positions"] - padded * ragged,
            value["rows"],
            value["lines"],
            value["reads"],
            value["pairs"],
            padded * (not ragged),
            value["decodes"] < value["rows"],
            value["starting"],
            value["span"],
        )
        host_s = None
        if alone and value["between_s"] is not None:
            host_s = max(0.0, value["between_s"] - value["busy_s"])
        found.append(TimedPass(size, value["busy_s"], host_s))
    return found


def profile_of(seen: SeenEngine, name: str, command: str = "") -> Profile:
    """The profile of an engine from what it has seen; raises BadConfig if that is too little."""
    about = seen.about
    passes = timed_passes(seen)
    if len(passes) < ENOUGH:
        raise BadConfig(f"the server has computed {len(passes)} passes, and a fit needs {ENOUGH}; send it some load")
    fit = fit_costs(passes)
    copy = {way: seconds or 0.0 for way, seconds in about["copy_block_s"].items()}
    costs = fit.costs
    values = {
        "format": FORMAT,
        "name": name,
        "quality": "measured",
        "error": fit.held_back["p90"],
        "model": about["model"],
        "card": {
            "name": about["device"],
            "kind": about["kind"],
            "memory_bytes": about["memory_bytes"],
            "bandwidth_gb_s": round((about["bytes_s"] or 0.0) / 1e9, 1),
            "tflop_s": round((about["flop_s"] or 0.0) / 1e12, 3),
        },
        "dtype": about["dtype"],
        "depth": about["depth"],
        "kv_tokens": about["kv_tokens"],
        "device": vars(costs.device),
        "host": vars(costs.host),
        "copies": vars(CopyCosts(0.0, copy["out"], copy["in"])),
        "note": "from the traffic of a running server: passes of other sizes are guesses, and fronts are not measured",
        "command": command,
        "held_back": fit.held_back,
    }
    return read_values(values, "made from a server")


def trace_of(seen: SeenEngine) -> list[TraceRequest]:
    """Its latest requests as they arrived. Of a prompt, what the prefix cache had is left out."""
    table = seen.requests
    rows = sorted(zip(*(table[name] for name in ("arrived_s", "prompt", "cached", "output")), strict=True))
    return [
        TraceRequest(at_s - rows[0][0], max(1, prompt - cached), max(1, output))
        for at_s, prompt, cached, output in rows
    ]
