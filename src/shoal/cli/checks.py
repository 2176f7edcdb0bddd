"""What can be checked before torch is imported, a process starts or weights load: files that are named, and the device.

Raises as the engine would, some seconds earlier. Knows no model and no torch.
"""

from pathlib import Path

from shoal.config.engine import EngineConfig
from shoal.errors import BadConfig
from shoal.machine.shares import may_have_gpu


def check_early(config: EngineConfig, elsewhere: bool = False) -> EngineConfig:
    """The config, if its files and its device are there. `elsewhere`: the model is on other machines."""
    if config.chat_template is not None:
        try:
            Path(config.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise BadConfig(f"cannot read chat_template {config.chat_template}: {why}") from error
    if elsewhere:
        return config
    if config.device == "cuda" and not may_have_gpu():
        raise BadConfig("device=cuda: this machine has no NVIDIA GPU, or hides it; check nvidia-smi, or use device=cpu")
    from shoal.files.source import check_there  # here: it loads numpy, which `shoal --help` need not

    check_there(config.model)
    if config.draft_model is not None:
        check_there(config.draft_model)
    return config
