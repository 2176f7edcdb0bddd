"""A front's process: what it sets up before it answers. The rest is tried with real processes in tests/story_server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.config.serve import ServeConfig, as_json
from shoal.processes import front as module
from shoal.server.app import Front
from shoal.server.templates import TemplateWorker
from shoal.text.grammar import Grammars
from tests.story.models import save_model


def test_everything_slow_is_set_up_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Front] = []

    async def answer(front: Front, *others: Any) -> None:
        assert front.tokenizer is not None
        assert "_hiding" in vars(front.tokenizer)  # the second tokenizer
        assert isinstance(front.preparer.grammars, Grammars)
        assert front.preparer.grammars._vocabulary is not None
        assert isinstance(front.preparer.templates, TemplateWorker)
        assert front.preparer.templates._serving is not None  # the process is being started
        seen.append(front)

    monkeypatch.setattr(module, "answer", answer)
    config = {
        "serve": as_json(ServeConfig()),
        "model": str(save_model(tmp_path / "model")),
        "chat_template": None,
        "special_tokens_in_messages": "text",
        "folder": str(tmp_path),
        "name": "front-0.0",
        "keys": False,
        "salt_secret": "00",
        "seed": None,
    }
    asyncio.run(module.run(config))
    assert seen
