"""What a model is, read from a Hugging Face config.json: sizes, biases, rope and attention windows.

Owns the meaning of the config's keys, old spelling and new, and refuses what Shoal cannot compute.
Does not know torch, tensors, files or kernels.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import UnsupportedModel, shown
from shoal.models.formats import checkpoint_format

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")
DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_THETA = 10_000.0
MISTRAL_WINDOW = 4096
QWEN_WINDOW = 4096
QWEN_FULL_LAYERS = 28
MOST = 2**31 - 1  # of any size: kernels count in 32 bits
MOST_LAYERS = 10_000  # some ten times the deepest known; weights are compared with all of them


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: its kind, and the numbers that the kind reads."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer. window 0 is full attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    kind: str = "gqa"

    @property
    def q_size(self) -> int:
        """Values in one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values in one token's keys (or values)."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class MlpSpec:
    """The MLP of one layer."""

    inner_size: int
    bias: bool
    kind: str = "gated"


@dataclass(frozen=True)
class ModelSpec:
    """The shape of one decoder-only model. `windows` has one number per layer; 0 is full attention."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    max_position: int
    windows: tuple[int, ...]
    dtype_name: str
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def q_size(self) -> int:
        """Values in one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values in one token's keys (or values) of one layer."""
        return self.kv_heads * self.head_dim

    def attention(self, layer: int) -> AttentionSpec:
        """The attention of one layer."""
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.windows[layer],
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=self.qk_norm,
        )

    def mlp(self, layer: int) -> MlpSpec:
        """The MLP of one layer."""
        return MlpSpec(self.intermediate_size, self.mlp_bias)

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers, without biases, embedding and lm_head."""
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All parameters of the model; a tied lm_head is counted once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        per_layer = 2 * self.hidden_size
        per_layer += (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.out_bias
        per_layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return tables + self.linear_weights + self.layers * per_layer + self.hidden_size

    @property
    def linear_flop_per_token(self) -> int:
        """Multiplications and additions of the linear layers for one token, without lm_head."""
        return 2 * self.linear_weights

    @property
    def head_flop(self) -> int:
        """The same for lm_head, for one sampled row."""
        return 2 * self.hidden_size * self.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Values that the KV cache holds for one token, over all layers."""
        return 2 * self.layers * self.kv_size


@dataclass(frozen=True)
class _Traits:
    """What a family's config.json leaves open, and the class that computes it."""

    family: str
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    out_bias: Callable[[Mapping[str, Any]], bool]
    mlp_bias: Callable[[Mapping[str, Any]], bool]
    windows: Callable[[Mapping[str, Any], int], tuple[int, ...]]
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / heads
    model: str = "shoal.models.llama:LlamaModel"  # module:class; imported only when a model is made


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json mapping.

    >>> spec = spec_from_config({
    ...     "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    ...     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    ...     "max_position_embeddings": 512, "rope_theta": 10000.0})
    >>> spec.head_dim, spec.kv_values_per_token, spec.windows
    (16, 128, (0, 0))
    """
    traits = _traits_of(config)
    _refuse_what_we_cannot_compute(config)
    hidden_size, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; correct config.json"
        )
    layers = _positive(config, "num_hidden_layers", most=MOST_LAYERS)
    max_position = _positive(config, "max_position_embeddings")
    return ModelSpec(
        family=traits.family,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, traits, hidden_size, heads),
        intermediate_size=_positive(config, "intermediate_size"),
        norm_eps=float(_number(config, "rms_norm_eps", 1e-6)),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=traits.qkv_bias(config),
        out_bias=traits.out_bias(config),
        mlp_bias=traits.mlp_bias(config),
        qk_norm=traits.qk_norm,
        rope=_rope(config, max_position),
        max_position=max_position,
        windows=traits.windows(config, layers),
        dtype_name=_dtype_name(config),
        eos_ids=_token_ids(config, "eos_token_id"),
        bos_id=_first(_token_ids(config, "bos_token_id")),
    )


def _traits_of(config: Mapping[str, Any]) -> _Traits:
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        name = architectures[0]
    else:
        name = architectures or _FAMILY_OF_TYPE.get(str(model_type), model_type)
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"architecture {shown(name)} is not supported; choose a model that is one of: {known}")
    return FAMILIES[name]


def _refuse_what_we_cannot_compute(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {shown(activation)} is not supported; known: {', '.join(ACTIVATIONS)}")
    checkpoint_format(config)


def _head_dim(config: Mapping[str, Any], traits: _Traits, hidden_size: int, heads: int) -> int:
    if config.get("head_dim") is None and traits.head_dim is None and hidden_size % heads:
        raise UnsupportedModel(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}; give head_dim in config.json"
        )
    head_dim = _positive(config, "head_dim", traits.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embedding needs an even number")
    return head_dim


def _rope(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """Old style: rope_theta beside rope_scaling. New style: everything in rope_parameters."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel("rope parameters per layer type are not supported; one set for all layers is needed")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope kind {shown(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UnsupportedModel(f"partial_rotary_factor {shown(partial)} is not supported; only 1 is")
    outer = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA}
    theta = float(_number({**outer, **given}, "rope_theta"))
    if theta <= 1:
        raise UnsupportedModel(f"rope_theta is {theta}; a number above 1 is needed in config.json")
    key = "original_max_position_embeddings"
    original_max_position = _positive(config, key, _positive(given, key, max_position))
    low, high = 1.0, 4.0
    if kind == "llama3":
        low, high = float(_number(given, "low_freq_factor")), float(_number(given, "high_freq_factor"))
    if low >= high:
        raise UnsupportedModel(
            f"low_freq_factor {low} is not below high_freq_factor {high}; correct the rope parameters in config.json"
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=_rope_factor(given, kind, max_position / original_max_position),
        original_max_position=original_max_position,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=_maybe_number(given, "attention_factor"),
        mscale=_maybe_number(given, "mscale"),
        mscale_all_dim=_maybe_number(given, "mscale_all_dim"),
        beta_fast=_maybe_number(given, "beta_fast") or 32.0,
        beta_slow=_maybe_number(given, "beta_slow") or 1.0,
        truncate=_flag(given, "truncate", True),
    )


def _rope_factor(given: Mapping[str, Any], kind: str, yarn_default: float) -> float:
    if kind == "default":
        return 1.0
    if kind == "yarn":
        return float(_number(given, "factor", yarn_default))
    return float(_number(given, "factor"))


def _no_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return (0,) * layers


def _mistral_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A missing key means the family's default, null means full attention."""
    if config.get("sliding_window", MISTRAL_WINDOW) is None:
        return (0,) * layers
    return (_positive(config, "sliding_window", MISTRAL_WINDOW),) * layers


def _qwen_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A window only if use_sliding_window is on, in the layers that layer_types or max_window_layers name."""
    if not _flag(config, "use_sliding_window") or config.get("sliding_window", QWEN_WINDOW) is None:
        return (0,) * layers
    window = _positive(config, "sliding_window", QWEN_WINDOW)
    kinds = config.get("layer_types")
    if kinds is None:
        key = "max_window_layers"
        full_layers = 0 if config.get(key) == 0 else _positive(config, key, QWEN_FULL_LAYERS)
        return tuple(window if layer >= full_layers else 0 for layer in range(layers))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModel(f"layer_types is {shown(kinds)}; a list with the kind of each layer is needed")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}; make them equal")
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModel(f"layer type {shown(unknown[0])} is not supported; known: {', '.join(LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {shown(name)} is not supported; known: {', '.join(DTYPES)}")
    return name


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    given = config.get(key)
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UnsupportedModel(f"{key} is {shown(given)}; a token id or a list of them is needed in config.json")
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    number = _number(config, key, default)
    if number > most or number != int(number):
        raise UnsupportedModel(f"{key} is {shown(number)}; a whole number up to {most} is needed in config.json")
    return int(number)


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"config.json has no {key!r}; add it or use the model's original config.json")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < sys.float_info.max:
        raise UnsupportedModel(f"{key} is {shown(value)}; a number above 0 is needed in config.json")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(f"{key} is {shown(value)}; true or false is needed in config.json")
    return default if value is None else value


def _maybe_number(config: Mapping[str, Any], key: str) -> float | None:
    """Null and 0 both mean the kind's own default."""
    return float(_number(config, key)) if config.get(key) else None


def _never(config: Mapping[str, Any]) -> bool:
    return False


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _attention_bias(config: Mapping[str, Any]) -> bool:
    return _flag(config, "attention_bias")


def _mlp_bias(config: Mapping[str, Any]) -> bool:
    return _flag(config, "mlp_bias")


FAMILIES = {
    "LlamaForCausalLM": _Traits("llama", _attention_bias, _attention_bias, _mlp_bias, _no_windows),
    "MistralForCausalLM": _Traits("mistral", _never, _never, _never, _mistral_windows),
    "Qwen2ForCausalLM": _Traits("qwen2", _always, _never, _never, _qwen_windows),
    "Qwen3ForCausalLM": _Traits(
        "qwen3", _attention_bias, _attention_bias, _never, _qwen_windows, qk_norm=True, head_dim=128
    ),
}
MODELS = {traits.family: traits.model for traits in FAMILIES.values()}
_FAMILY_OF_TYPE = {traits.family: architecture for architecture, traits in FAMILIES.items()}
