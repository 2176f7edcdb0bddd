"""Small checkpoints of random numbers, and the same in 4 bits as AWQ and GPTQ write them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.models import model_class, spec_from_config
from shoal.models.layout import places

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": 64,
    "rope_theta": 1e4, "torch_dtype": "bfloat16",
}  # fmt: skip
SPEC = spec_from_config(CONFIG)


def numbers() -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = places(model_class(SPEC).layout(SPEC))
    return {name: torch.randn(place.shape) * place.shape[-1] ** -0.5 for name, place in found.items()}


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def packed(kind: str, group: int, folder: Path, shuffled: bool = False, symmetric: bool = False) -> dict[str, Tensor]:
    """Rounds to the nearest of 16 steps and writes the layout of these tools, number by number. Returns the numbers
    that are meant."""
    tensors, meant = {}, {}
    for name, tensor in numbers().items():
        stem = name.removesuffix(".weight")
        if not is_matrix(name):
            tensors[name] = meant[name] = tensor.to(torch.float16)
            continue
        outputs, inputs = tensor.shape
        size = inputs if group < 0 else group
        group_of = torch.arange(inputs) // size
        if shuffled:
            group_of = group_of[torch.randperm(inputs)]
            tensors[f"{stem}.g_idx"] = group_of.to(torch.int32)
        values = torch.empty(inputs, outputs, dtype=torch.int64)
        zeros, scales = (torch.empty(inputs // size, outputs) for _ in range(2))
        for one in range(inputs // size):
            members = tensor[:, group_of == one]
            low, high = members.amin(1), members.amax(1)
            if symmetric:  # the zero point is 8
                most = torch.maximum(-low, high)
                low, high = -most * 16 / 15, most * 14 / 15
            scales[one] = ((high - low) / 15).half().float()
            zeros[one] = (-low / scales[one]).round().clamp(1, 15)
            values[group_of == one] = (
                ((members / scales[one, :, None]).round() + zeros[one, :, None]).clamp(0, 15).long().t()
            )
        meant[name] = ((values - zeros[group_of]) * scales[group_of]).t()
        tensors[f"{stem}.scales"] = scales.half()
        place = {"awq": [0, 2, 4, 6, 1, 3, 5, 7], "gptq": list(range(8))}[kind]

        def words(table: np.ndarray, places: list[int] = place) -> Tensor:
            """Eight neighbours of each row in a word."""
            made = np.zeros((len(table), table.shape[1] // 8), dtype=np.uint32)
            for bit, at in enumerate(places):
                made |= table[:, at::8].astype(np.uint32) << np.uint32(4 * bit)
            return torch.from_numpy(made.view(np.int32))

        if kind == "awq":
            tensors[f"{stem}.qweight"], tensors[f"{stem}.qzeros"] = words(values.numpy()), words(zeros.numpy())
        else:
            tensors[f"{stem}.qweight"] = words(values.t().numpy()).t()
            tensors[f"{stem}.qzeros"] = words(zeros.numpy() - 1)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return meant
