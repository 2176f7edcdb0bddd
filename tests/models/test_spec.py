"""config.json in, ModelSpec out; and what is refused, with which words."""

import doctest
import subprocess
import sys
from typing import Any

import pytest

from shoal.errors import UnsupportedModel
from shoal.models import model_class, spec, spec_from_config
from shoal.models.layout import shapes
from shoal.models.spec import FAMILIES

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def config(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def test_the_example_runs() -> None:
    assert doctest.testmod(spec).failed == 0


def test_reading_a_spec_does_not_load_torch() -> None:
    code = "import sys, shoal.models, shoal.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_counts_of_smollm2_135m() -> None:
    found = spec_from_config(
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope_theta": 100000,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
        }
    )
    assert found.parameters == 134_515_008
    assert found.linear_flop_per_token == 2 * 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
    assert found.head_flop == 2 * 576 * 49152
    assert found.kv_values_per_token == 2 * 30 * 3 * 64
    assert (found.family, found.dtype_name, found.eos_ids, found.bos_id) == ("llama", "bfloat16", (0,), None)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parameters_is_the_sum_of_all_shapes(architecture: str) -> None:
    found = spec_from_config(config(architectures=[architecture], attention_bias=True, mlp_bias=True))
    total = 0
    for _, shape in shapes(model_class(found).layout(found)):
        size = 1
        for side in shape:
            size *= side
        total += size
    assert found.parameters == total


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    old = spec_from_config(config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}))
    older = spec_from_config(config(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}))
    new = spec_from_config(config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}))
    assert old.rope == older.rope == new.rope
    assert (new.rope.theta, new.rope.kind, new.rope.original_max_position) == (5e5, "llama3", 128)
    assert spec_from_config(config(rope_scaling=None)).rope.theta == 10_000


def test_yarn_reads_all_its_numbers() -> None:
    given = {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}
    rope = spec_from_config(config(rope_parameters=given, original_max_position_embeddings=128)).rope
    assert (rope.factor, rope.mscale, rope.mscale_all_dim) == (4.0, 0.7, 1.0)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate, rope.attention_factor) == (16.0, 1.0, False, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64, 64)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 64}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, (0, 0, 64)),
        ({"use_sliding_window": True, "sliding_window": None}, (0, 0, 0)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, 0, 64),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert spec_from_config(config(**{"architectures": ["Qwen3ForCausalLM"], **changes})).windows == windows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, r"0\.5"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": "three"}, "three"),
        ({"num_hidden_layers": 2.5}, r"2\.5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "66.*head_dim"),
        ({"head_dim": 15}, "odd"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8.*bfloat16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "names 1 layers",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["linear"] * 3},
            "linear.*sliding_attention",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_from_config(config(**changes))
