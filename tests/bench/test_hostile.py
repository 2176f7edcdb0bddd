"""The hostile bench: which requests it sends, how it reads answers, and what it says to bad flags."""

import argparse
import asyncio
from pathlib import Path

import msgspec
import pytest

from shoal.bench.hostile import CLOSED, OPEN, send_all
from shoal.bench.hostile_bodies import BODY_BYTES, TEMPLATES, Attack, attacks, template
from shoal.cli.hostile import choose
from shoal.errors import BadConfig
from shoal.text.template import ChatTemplate


def test_every_body_is_within_the_default_limit_and_has_its_own_name() -> None:
    known = attacks()
    assert len({one.name for one in known}) == len(known)
    large = 0
    for one in known:
        body = one.body()
        assert len(body) <= 4 * 2**20, one.name
        large += len(body) > BODY_BYTES * 0.9
        if one.name != "not JSON":
            assert msgspec.json.decode(body, type=dict[str, msgspec.Raw]), one.name
    assert large > 10


def test_the_template_is_ordinary_unless_it_is_asked_for_an_attack() -> None:
    text = ChatTemplate(template()).render([{"role": "user", "content": "Hi"}], {})
    assert text.strip() == "user: Hi\nassistant:"
    assert {one.name for one in attacks() if one.name.startswith("template")} == {f"template: {n}" for n in TEMPLATES}


async def answered(reply: bytes, finished: bool = True, limit_s: float = 20.0) -> dict[str, int]:
    """What send_all() makes of a server that gives this reply to every request once its body is there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        got = b""
        while len(got) < length:
            more = await reader.read(1 << 16)
            if not more:
                break
            got += more
        else:
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        attack = Attack("mine", "/v1/completions", lambda: b"x" * 3_000_000, 3, finished)
        return dict(await send_all(host, port, attack, limit_s))


def test_answers_are_counted_by_status() -> None:
    assert asyncio.run(answered(b"HTTP/1.1 413 Too Large\r\n\r\n{}")) == {"413": 3}
    assert asyncio.run(answered(b"")) == {CLOSED: 3}
    assert asyncio.run(answered(b"HTTP/1.1 200 OK\r\n\r\n", finished=False, limit_s=0.5)) == {OPEN: 3}


def flags(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"only": [], "body": [], "copies": 4, **more})


def test_attacks_are_chosen_by_word_or_read_from_a_file(tmp_path: Path) -> None:
    assert len(choose(flags())) == len(attacks())
    assert {one.name.split(":")[0] for one in choose(flags(only=["template"]))} == {"template"}
    (tmp_path / "mine.json").write_bytes(b"{}")
    (one,) = choose(flags(body=[f"/tokenize={tmp_path / 'mine.json'}"], copies=7))
    assert (one.path, one.body(), one.copies) == ("/tokenize", b"{}", 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"only": ["no such"]}, "no attack has 'no such' in its name"),
        ({"body": ["mine.json"]}, "PATH=FILE"),
        ({"body": ["/tokenize=/no/such/file"]}, "cannot read /no/such/file"),
    ],
)
def test_bad_flags_say_what_to_change(given: dict[str, list[str]], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        choose(flags(**given))
