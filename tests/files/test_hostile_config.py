"""Every value that a model's JSON files are read for, as something absurd: a ShoalError or a model that works."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shoal.core.params import SamplingParams
from shoal.errors import ShoalError
from shoal.files.source import ModelFiles, eos_ids, find_model, sampling_defaults
from shoal.models.spec import FAMILIES, MOST, MOST_LAYERS, ROPE_KINDS, spec_from_config
from shoal.text.tokenizer import load_tokenizer
from tests.files.hostile import ABSURD, NO_FILES, Recorder, edit, refusal, said_by
from tests.story.models import SIZES, copy

ROPES = [
    {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0,
     "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    for kind in ROPE_KINDS
]  # fmt: skip


def configs() -> list[dict[str, Any]]:
    """A good config.json for each family and kind of rope, with windows where the family has them."""
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    return [
        {**SIZES, **window, "architectures": [family], "rope_scaling": rope} for family in FAMILIES for rope in ROPES
    ]


def keys_read() -> list[str]:
    seen: set[str] = set()
    for config in configs():
        spec_from_config(Recorder(config, seen))
        find_keys = ModelFiles("m", Path(), "folder", Recorder(config, seen), Recorder({}, set()))
        eos_ids(find_keys)
    return sorted(seen)


def test_all_keys_are_known_here() -> None:
    """The list below derives from what is read; these are the ones the issue names."""
    assert {"num_hidden_layers", "vocab_size", "eos_token_id", "rope_scaling", "layer_types"} <= set(keys_read())
    assert len(keys_read()) > 20


@pytest.mark.parametrize("key", keys_read())
def test_a_config_is_read_or_refused(key: str) -> None:
    for config in configs():
        for name, value in ABSURD.items():
            bad = {**config, key: value}
            said = said_by(lambda bad=bad: spec_from_config(bad))  # type: ignore[misc]
            if said:
                named = {"architectures": "architecture", "torch_dtype": "dtype"}.get(key, key.split("_")[0])
                assert named in said, f"{name}: {said}"
                assert len(said) < 1000
                continue
            spec = spec_from_config(bad)
            sizes = (spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size)
            assert all(0 < size <= MOST for size in (*sizes, spec.max_position))
            assert 0 < spec.layers <= MOST_LAYERS


@pytest.mark.parametrize("key", sorted({key for rope in ROPES for key in rope} | {"truncate", "attention_factor"}))
@pytest.mark.parametrize("rope", ROPES, ids=ROPE_KINDS)
def test_rope_parameters_are_read_or_refused(rope: dict[str, Any], key: str) -> None:
    import torch

    from shoal.models.rope import RopeTable, rope_amplitude

    for value in ABSURD.values():
        for where in ("rope_scaling", "rope_parameters"):
            config = {**SIZES, "architectures": ["LlamaForCausalLM"], where: {**rope, key: value}}
            try:
                spec = spec_from_config(config)
                table = RopeTable(spec.rope, spec.head_dim, torch.device("cpu"))
            except ShoalError:
                continue
            assert bool(torch.isfinite(table.frequencies).all())
            assert rope_amplitude(spec.rope) > 0


# what passes the reading of the config must not fail later, when weights and caches are made
@pytest.mark.parametrize("key", [*SIZES, "head_dim", "rope_theta", "torch_dtype", "dtype", "attention_bias"])
def test_a_model_with_such_a_config_works_or_is_refused(folder: Path, key: str) -> None:
    good = json.loads((folder / "config.json").read_text())
    good |= {"rope_parameters": None, "dtype": None, "torch_dtype": None}
    for name, value in ABSURD.items():
        (folder / "config.json").write_text(json.dumps({**good, key: value}))
        said = refusal(folder)
        if name in ("text", "object") and key != "initializer_range":
            assert key.removeprefix("torch_") in said, f"{key} = {value!r}: {said}"


@pytest.mark.parametrize("name", ["1e9", "2**31", "2**63", "10**400"])
@pytest.mark.parametrize("key", [key for key in SIZES if key.startswith(("num_", "vocab", "hidden", "inter"))])
def test_random_weights_of_absurd_sizes(folder: Path, key: str, name: str) -> None:
    edit(folder / "config.json", {key: ABSURD[name], "head_dim": 16})
    assert refusal(folder, load_format="dummy")


GENERATION = ("eos_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@pytest.mark.parametrize("key", GENERATION)
def test_generation_configs(folder: Path, key: str) -> None:
    for value in ABSURD.values():
        (folder / "generation_config.json").write_text(json.dumps({key: value}))
        said = said_by(lambda: (eos_ids(find_model(str(folder))), sampling_defaults(find_model(str(folder)))))
        if said:
            assert key in said or "generation_config.json" in said
            assert len(said) < 1000
        else:
            files = find_model(str(folder))
            assert all(0 <= i < SIZES["vocab_size"] for i in eos_ids(files))
            SamplingParams().resolved(sampling_defaults(files))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 1, 2**40, 319, 320]}))
    assert eos_ids(find_model(str(folder))) == (1, 319)  # of 320; the config names 1


NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "chat_template", "model_max_length")
ENTRIES = ({"name": [1], "template": 5}, {"name": "default", "template": ["a"]}, {"content": 3}, {"template": "a"}, 7)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", NAMED)
def test_names_of_special_tokens(folder: Path, file: str, key: str) -> None:
    good = json.loads((folder / "tokenizer_config.json").read_text())
    for value in [*ABSURD.values(), *ENTRIES, *([entry] for entry in ENTRIES), list(ENTRIES)]:
        (folder / file).write_text(json.dumps({**good, key: value}))
        said = said_by(lambda: load_tokenizer(find_model(str(folder))))
        assert len(said) < 1000
        if not said:
            tokenizer = load_tokenizer(find_model(str(folder)))
            assert tokenizer is not None
            assert tokenizer.encode("Once")


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", "model.safetensors", "model.safetensors.index.json")  # fmt: skip
MAY_BE_ANYTHING = ("chat_template.jinja",)  # any text is a template


@pytest.mark.timeout(120, method="thread")  # a reader that waits for a FIFO cannot be interrupted
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("file", FILES)
def test_something_else_in_place_of_a_file(folder: Path, file: str, kind: str) -> None:
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / file).unlink(missing_ok=True)
    NO_FILES[kind](folder / file)
    said = refusal(folder)
    if file not in MAY_BE_ANYTHING or kind not in (
        "empty",
        "deep",
        "deep list",
        "long number",
        "number",
        "text",
        "zeros",
    ):
        assert file in said


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for name, make in NO_FILES.items():
        path = tmp_path / name.replace(" ", "-")
        make(path)
        if not path.is_dir():
            assert refusal(path)
    for name in ("\0", "a" * 5000, "~nobody-of-this-name/model", "", "a\nb", "/dev/zero", "/dev/tty", "/proc/self/mem"):
        with pytest.raises(ShoalError):
            find_model(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try to read as somebody else")
@pytest.mark.parametrize("file", [".", *FILES, "m.gguf"])
def test_files_that_may_not_be_read(model: Path, file: str) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        folder = copy(model, Path(place) / "m")
        if file == "model.safetensors.index.json":
            (folder / "model.safetensors").unlink()
        if file == "m.gguf":
            shutil.rmtree(folder)
            folder.mkdir()
        (folder / file).touch()
        Path(place).chmod(0o755)
        folder.chmod(0o755)
        (folder / file).chmod(0)
        os.seteuid(65534)
        try:
            said = refusal(folder)
        finally:
            os.seteuid(0)
        assert str(folder / file) in said
