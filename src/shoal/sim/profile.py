"""Profiles: how long one model takes on one device, as a JSON file.

Owns the file's form and its errors, the profiles that come with the package, and how one is derived for another card.
Written by `shoal calibrate`, read by `shoal simulate`. Knows no engine.

    {"format": 1, "name": …, "quality": "measured" | "provisional" | "estimated", "error": 0.05, "note": …,
     "model": {…}, "card": {…}, "dtype": …, "depth": 2, "kv_tokens": …,
     "device": {"decode": [[positions, seconds], …], "mixed": […], "row_s": …, …},
     "host": {…}, "copies": {…}, "front": {…}, "held_back": {…}, "command": …}
"""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.names import pick
from shoal.core.work import DeviceRates, ModelWork
from shoal.errors import BadConfig
from shoal.sim.cost import CopyCosts, CostModel, DeviceTimes, HostTimes, Points
from shoal.sim.front import FrontTimes

FORMAT = 1
QUALITIES = ("measured", "provisional", "estimated")
ESTIMATED_ERROR = 0.25  # of a derived profile, at least


@dataclass(frozen=True)
class ModelShape:
    """What the costs of a pass depend on."""

    name: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    kv_token_bytes: int  # of keys and values of one token, over all layers
    hidden_size: int = 0  # 0: heads · head_dim

    @property
    def head_weights(self) -> int:
        """Of lm_head."""
        return (self.hidden_size or self.heads * self.head_dim) * self.vocab_size

    @property
    def linear_weights(self) -> int:
        """Of all other linear layers, the tables of the vocabulary taken for one."""
        return max(0, self.parameters - self.head_weights)


@dataclass(frozen=True)
class Card:
    """A device, as its datasheet or a measurement has it."""

    name: str
    kind: str  # cpu or cuda
    memory_bytes: int
    bandwidth_gb_s: float
    tflop_s: float  # of dense matrices in the profile's type


# dense bfloat16 rates; datasheets of the vendors
CARDS = {
    "h200": Card("NVIDIA H200", "cuda", 141 * 10**9, 4800, 989),
    "h100": Card("NVIDIA H100 SXM", "cuda", 80 * 10**9, 3350, 989),
    "a100": Card("NVIDIA A100 SXM 80 GB", "cuda", 80 * 10**9, 2039, 312),
    "l40s": Card("NVIDIA L40S", "cuda", 48 * 10**9, 864, 362),
    "b200": Card("NVIDIA B200", "cuda", 180 * 10**9, 8000, 2250),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", "cuda", 24 * 10**9, 1008, 165),
    "rtx5090": Card("NVIDIA GeForce RTX 5090", "cuda", 32 * 10**9, 1792, 210),
}


@dataclass(frozen=True)
class Profile:
    """One model on one device."""

    name: str
    quality: str  # one of QUALITIES
    error: float  # how far a pass may be off, as a share: p90 of held-back passes, or a guess where it is estimated
    model: ModelShape
    card: Card
    dtype: str
    depth: int  # passes in flight
    kv_tokens: int  # that fit into the KV cache by default
    device: DeviceTimes
    host: HostTimes = field(default_factory=HostTimes)
    copies: CopyCosts = field(default_factory=CopyCosts)
    front: FrontTimes = field(default_factory=FrontTimes)
    note: str = ""
    command: str = ""
    held_back: dict[str, float] = field(default_factory=dict)  # errors on passes that the fit has not seen

    @property
    def costs(self) -> CostModel:
        return CostModel(self.device, self.host, self.copies)

    @property
    def work(self) -> ModelWork:
        """What passes compute and move, from the shape: the head is taken for one of the tables of the vocabulary."""
        model = self.model
        head, linear = model.head_weights, model.linear_weights
        item_bytes = model.weight_bytes / max(model.parameters, 1)
        pair = 4 * model.layers * model.heads * model.head_dim
        return ModelWork(2 * linear, 2 * head, pair, (linear + head) * item_bytes, model.kv_token_bytes)

    @property
    def rates(self) -> DeviceRates:
        return DeviceRates(self.card.tflop_s * 1e12, self.card.bandwidth_gb_s * 1e9)

    def in_words(self) -> str:
        """One line for a report."""
        sure = f"{self.quality}, passes within {self.error:.0%}"
        return f"{self.model.name}, {self.dtype}, on {self.card.name} ({sure})"


T = TypeVar("T")


def _read(kind: type[T], values: Any, where: str) -> T:
    """A dataclass from a JSON object; every key must be known, and every number finite and not negative."""
    if not isinstance(values, dict):
        raise BadConfig(f"{where} must be an object, not {values!r}")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        pick(known, name, f"key of {where}")
    made: dict[str, Any] = {}
    for name, item in known.items():
        if name in values:
            made[name] = _value(item.type, values[name], f"{where}, {name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise BadConfig(f"{where} has no {name}; run shoal calibrate again, or add it")
    return kind(**made)


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _read(kind, value, where)  # type: ignore[arg-type]
    if kind is str:
        if not isinstance(value, str):
            raise BadConfig(f"{where} must be a text, not {value!r}")
        return value
    if kind == Points:
        return _points(value, where)
    if kind == dict[str, float]:
        if not isinstance(value, dict):
            raise BadConfig(f"{where} must be an object, not {value!r}")
        return {str(name): _number(one, f"{where}, {name}") for name, one in value.items()}
    number = _number(value, where)
    return int(number) if kind is int else number


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise BadConfig(f"{where} must be a number that is not negative, not {value!r}")
    return value


def _points(value: Any, where: str) -> Points:
    try:
        points = tuple((int(_number(at, where)), float(_number(seconds, where))) for at, seconds in value)
    except (TypeError, ValueError):
        raise BadConfig(f"{where} must be a list of [positions, seconds] pairs, not {value!r}") from None
    at = [one for one, _ in points]
    if not points or at != sorted(set(at)):
        raise BadConfig(f"{where} must have at least one pair, with ascending positions")
    if not all(seconds > 0 for _, seconds in points):
        raise BadConfig(f"{where}: a pass takes more than 0 seconds")
    return points


def parse_profile(text: str, where: str) -> Profile:
    """A profile from its JSON text."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"the profile {where} is not JSON: {error}") from error
    return read_values(values, where)


def read_values(values: Any, where: str) -> Profile:
    """A profile from what its JSON says."""
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise BadConfig(f"{where} is not a profile of format {FORMAT}; write one with shoal calibrate")
    profile = _read(Profile, values, f"the profile {where}")
    pick(dict.fromkeys(QUALITIES), profile.quality, f"quality of {where}")
    if profile.card.kind not in ("cpu", "cuda"):
        raise BadConfig(f"the profile {where} is of a card of kind {profile.card.kind!r}; known: cpu, cuda")
    shape = profile.model
    least = {
        "depth": profile.depth,
        "kv_tokens": profile.kv_tokens,
        "model, max_model_len": shape.max_model_len,
        "model, vocab_size": shape.vocab_size,
        "model, kv_token_bytes": shape.kv_token_bytes,
    }
    for name, value in least.items():
        if value < 1:
            raise BadConfig(f"the profile {where}: {name} must be at least 1, not {value}")
    return profile


def profile_text(profile: Profile) -> str:
    """The JSON text of a profile, stable for the same profile."""
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1) + "\n"


def shipped() -> dict[str, str]:
    """Profiles that come with the package: name → JSON text."""
    folder = resources.files("shoal.sim").joinpath("profiles")
    found = (one for one in folder.iterdir() if one.name.endswith(".json"))
    return {one.name.removesuffix(".json"): one.read_text() for one in sorted(found, key=lambda one: one.name)}


def read_profile(name: str) -> Profile:
    """A file, or one that comes with the package; NAME@CARD: derived for another card.

    >>> read_profile("llama-8b-h200@l40s").quality
    'estimated'
    """
    base, _, card = name.partition("@") if not Path(name).exists() else (name, "", "")
    if Path(base).suffix == ".json" or "/" in base:
        try:
            profile = parse_profile(Path(base).read_text(), base)
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(f"cannot read the profile {base}: {error}") from error
    else:
        known = shipped()
        profile = parse_profile(pick(known, base, "profile"), base)
    return derive(profile, pick(CARDS, card, "card")) if card else profile


def derive(profile: Profile, card: Card) -> Profile:
    """The profile on another card: what reads memory scales with bandwidth, what computes with the matrix rate.

    The first point of a table is taken as the weights being read once; what more positions add is arithmetic. Datasheet
    is compared with datasheet: what a card reaches of its own is taken to be the same share on both.
    """
    if card.kind != profile.card.kind:
        raise BadConfig(
            f"a profile of {profile.card.name} says nothing of {card.name}: a {card.kind}; measure it there"
        )
    base = next((one for one in CARDS.values() if one.name == profile.card.name), profile.card)
    slower_memory = base.bandwidth_gb_s / card.bandwidth_gb_s
    slower_maths = base.tflop_s / card.tflop_s
    kv_tokens = room_for_kv(profile.model, card, profile.dtype)

    def scaled(points: Points) -> Points:
        first = points[0][1]
        return tuple((at, first * slower_memory + (seconds - first) * slower_maths) for at, seconds in points)

    times = profile.device
    device = DeviceTimes(
        scaled(times.decode),
        scaled(times.mixed),
        times.row_s * slower_memory,
        times.draw_s * slower_memory,
        times.read_s * slower_memory,
        times.pair_s * slower_maths,
        times.span_s * slower_maths,
    )
    return replace(
        profile,
        name=f"{profile.name} on {card.name}",
        quality="estimated",
        error=max(profile.error, ESTIMATED_ERROR),
        card=card,
        kv_tokens=kv_tokens,
        device=device,
        note=f"derived from {profile.card.name} by the datasheets' bandwidth and matrix rate",
        held_back={},
    )


def room_for_kv(model: ModelShape, card: Card, dtype: str) -> int:
    """Tokens whose KV fits beside the weights; raises BadConfig if there is no room."""
    found = int((card.memory_bytes * 0.9 - model.weight_bytes) // model.kv_token_bytes)
    if found < 1:
        raise BadConfig(
            f"{model.name} in {dtype} takes {model.weight_bytes / 1e9:.1f} GB, which leaves no memory for KV on "
            f"{card.name} ({card.memory_bytes / 1e9:.0f} GB); choose a larger card"
        )
    return found


def reshape(profile: Profile, model: ModelShape) -> Profile:
    """The profile of another model on the same card.

    A pass of one position reads the weights once, at the card's bandwidth; what it takes beyond that (launches) goes
    with the layers. What more positions add is arithmetic, and goes with the weights of the linear layers; reads go
    with the bytes of a token's KV; pairs with the layers' heads. The host's time stays.
    """
    old, times, card = profile.model, profile.device, profile.card
    deeper, wider = model.layers / old.layers, model.linear_weights / max(old.linear_weights, 1)
    longer = model.kv_token_bytes / old.kv_token_bytes

    def scaled(points: Points) -> Points:
        first = points[0][1]
        read_s = min(first, old.weight_bytes / (card.bandwidth_gb_s * 1e9))
        least = read_s * model.weight_bytes / old.weight_bytes + (first - read_s) * deeper
        return tuple((at, least + (seconds - first) * wider) for at, seconds in points)

    device = DeviceTimes(
        scaled(times.decode),
        scaled(times.mixed),
        times.row_s * deeper,
        times.draw_s * model.head_weights / old.head_weights,
        times.read_s * longer,
        times.pair_s * (model.layers * model.heads * model.head_dim) / (old.layers * old.heads * old.head_dim),
        times.span_s * deeper,
    )
    copies = profile.copies
    return replace(
        profile,
        name=f"{profile.name} as {model.name}",
        quality="estimated",
        error=max(profile.error, ESTIMATED_ERROR),
        model=model,
        kv_tokens=room_for_kv(model, card, profile.dtype),
        device=device,
        copies=CopyCosts(copies.order_s, copies.out_block_s * longer, copies.in_block_s * longer),
        note=f"derived from {old.name} by the shapes of the models",
        held_back={},
    )
