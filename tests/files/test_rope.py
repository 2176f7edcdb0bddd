"""llama3 rotary scaling must come back from the factors that a GGUF file stores."""

from pathlib import Path

import numpy as np
import pytest

from shoal.errors import UnsupportedModel
from shoal.files.rope import llama3_factors, rope_scaling

NOTHING = {"type": None, "factor": None, "original_context_length": None}


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64), (32.0, 128)])
@pytest.mark.parametrize(("original", "high"), [(8192, 4.0), (4096, 8.0)])
def test_llama3_parameters_are_recovered(factor: float, head_dim: int, original: int, high: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    factors = llama3_factors(scaling, 500000.0, head_dim).astype(np.float32)
    assert rope_scaling(NOTHING, factors, 500000.0, 131072, Path("m.gguf")) == scaling


def test_llama3_factors_equal_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters={**scaling, "rope_theta": 500000.0}, head_dim=128
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / llama3_factors(scaling, 500000.0, 128), theirs.numpy(), rtol=1e-5)


def test_other_factors_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="llama3"):
        rope_scaling(NOTHING, np.linspace(1, 5, 32, dtype=np.float32), 1e4, 4096, Path("m.gguf"))
