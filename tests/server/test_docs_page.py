"""The API page in a real browser: every endpoint and field, examples for curl and Python, and requests sent from it.

Tests that ask for `base_url` alone hold for any server: SHOAL_PAGES_URL points them at one that runs.
"""

import ast
import json
import shlex
from collections.abc import Iterator

import httpx
import pytest

from tests.server.axe import LOOKS, serious
from tests.server.chromium import PATIENCE_S, Browser, Tab
from tests.server.page_server import EVIL, FULL, WORDS, FakeServer, needs_chromium

pytestmark = needs_chromium
CHAT = "#post-v1-chat-completions"
OPEN_ALL = """(() => {
  for (let left = 9; left; left -= 1) document.querySelectorAll("details:not([open])").forEach((one) => {
    one.open = true;
    one.dispatchEvent(new Event("toggle"));
  });
})()"""


@pytest.fixture
def docs(browser: Browser, base_url: str) -> Iterator[Tab]:
    tab = browser.open(f"{base_url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    yield tab
    tab.close()


def test_it_shows_every_endpoint_of_the_schema(docs: Tab, base_url: str) -> None:
    spec = httpx.get(f"{base_url}/openapi.json").json()
    shown = {" ".join(text.split()) for text in docs.texts(".endpoint h4")}
    every = {(method, path) for path, item in spec["paths"].items() for method in item if method in ("get", "post")}
    assert shown >= {f"{method.upper()} {path}" for method, path in every}
    assert docs.texts("table") == [], "sections are made when they are opened"
    docs.run(OPEN_ALL)
    statuses = docs.texts(".endpoint tbody tr > th code")
    for item in spec["paths"].values():
        for method in ("get", "post"):
            assert set(item.get(method, {}).get("responses", {})) <= set(statuses)
    examples = [shlex.split(text) for text in docs.texts(".curl pre")]
    assert len(examples) == len(shown)
    for words in examples:
        assert words[0] == "curl"
        assert any(word.startswith(base_url) for word in words[1:4])
        if "-d" in words:
            assert isinstance(json.loads(words[words.index("-d") + 1]), dict)
    for program in docs.texts(".python pre"):
        ast.parse(program)
        assert base_url in program
    assert docs.complaints() == []


def test_it_reads_references_limits_and_schemas_that_hold_themselves(docs: Tab, fake: FakeServer) -> None:
    docs.run(OPEN_ALL)
    chat = docs.text(CHAT)
    assert "messages required" in chat
    assert "list of object" in chat
    assert '"user" or "system"' in chat
    assert "number" in chat
    assert "or null" not in chat
    assert "default 1, at least 0\n" in chat, "and no limit that nobody meets"
    assert EVIL.replace("`", "") in chat, "a description is text; only `code` is set apart"
    assert docs.run("document.querySelectorAll('#endpoints b, #endpoints img, #about img').length") == 0
    curl = shlex.split(docs.text(f"{CHAT} .curl pre"))
    assert json.loads(curl[curl.index("-d") + 1]) == {"messages": [{"role": "user", "content": "it's me"}]}
    assert "Authorization: Bearer $SHOAL_API_KEY" in curl
    assert f"{fake.url}/v1/models/a%20b" in docs.text("#get-v1-models-model- .curl pre")
    assert "Authorization" not in docs.text("#get-health .curl pre")
    assert docs.run("window.hacked === undefined")


def test_sections_are_closed_until_they_are_opened(docs: Tab, fake: FakeServer) -> None:
    assert docs.run("[...document.querySelectorAll('details')].every((one) => !one.open)")
    docs.click(f"{CHAT} > summary")
    docs.wait(f"document.querySelector('{CHAT} .curl')")
    assert docs.texts(f"{CHAT} > details > summary") == ["Try it", "Fields of the body", "Answers"]
    assert docs.texts(f"{CHAT} table") == []
    docs.click(f"{CHAT} > details:nth-of-type(2) > summary")
    docs.wait(f"document.querySelector('{CHAT} table')")
    shown = docs.texts(f"{CHAT} > details > .scroll > table > tbody > tr > th code")
    assert shown == ["messages", "temperature", "anything", "within"], "those without effect are folded"
    assert "1 more that other servers have" in docs.text(CHAT)
    docs.click("#contents a[href='#get-health']")
    docs.wait("document.querySelector('#get-health .curl')")
    assert docs.run("document.getElementById('get-health').open")
    docs.go(f"{fake.url}/docs{CHAT}")
    docs.wait(f"document.querySelector('{CHAT} .curl')")
    assert docs.complaints() == []


def test_python_stands_beside_curl(docs: Tab, fake: FakeServer) -> None:
    docs.click(f"{CHAT} > summary")
    docs.wait(f"document.querySelector('{CHAT} .curl')")
    assert docs.texts(f"{CHAT} [role=tab]") == ["curl", "Python"]
    assert docs.text(f"{CHAT} .python") == ""
    docs.click(f"{CHAT} [role=tab]:nth-child(2)")
    assert docs.text(f"{CHAT} .python pre") == f'ask("{fake.url}/v1", "it\'s me")', "with this server's address"
    assert docs.text(f"{CHAT} .curl") == ""
    docs.press("ArrowLeft")
    assert docs.run("document.activeElement.innerText") == "curl"
    assert docs.text(f"{CHAT} .curl pre").startswith("curl")
    docs.press("ArrowRight")
    assert docs.run("document.activeElement.getAttribute('aria-selected')") == "true"


# ---- trying it


def open_try(tab: Tab, endpoint: str) -> None:
    tab.click(f"{endpoint} > summary")
    tab.wait(f"document.querySelector('{endpoint} > details')")
    tab.click(f"{endpoint} > details > summary")
    tab.wait(f"document.querySelector('{endpoint} .try')")


def send(tab: Tab, endpoint: str, told: str) -> str:
    """Press the button, and wait until the status says this; returns the answer."""
    tab.click(f"{endpoint} .try button.strong")
    tab.wait(
        f"(note => note.includes({json.dumps(told)}) && (note.includes('all after') || !note.includes('first byte')))"
        f"(document.querySelector('{endpoint} .answer .note').innerText)"
    )
    return tab.text(f"{endpoint} .answer pre")


def test_a_request_is_sent_from_the_page(docs: Tab, fake: FakeServer) -> None:
    open_try(docs, CHAT)
    answer = send(docs, CHAT, "all after")
    assert fake.asked == [{"messages": [{"role": "user", "content": "it's me"}]}]
    assert "data: [DONE]" in answer
    for word in WORDS:
        assert word.strip() in answer
    assert docs.text(f"{CHAT} .answer .note").startswith("200 OK · text/event-stream · first byte after ")
    docs.fill(f"{CHAT} textarea", '{"messages": [{"role": "user", "content": "full"}]}')
    refused = json.loads(send(docs, CHAT, "429"))
    assert refused["error"]["message"] == FULL["message"]
    docs.fill(f"{CHAT} textarea", '{"messages": ')
    send(docs, CHAT, "The body is not JSON")
    assert len(fake.asked) == 2, "what is not JSON is not sent"
    assert docs.complaints(network=False) == []


def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(docs: Tab, fake: FakeServer) -> None:
    open_try(docs, CHAT)
    docs.fill(f"{CHAT} textarea", '{"messages": [{"role": "user", "content": "forever"}]}')
    docs.click(f"{CHAT} .try button.strong")
    docs.wait(f"/more .*more /s.test(document.querySelector('{CHAT} .answer pre').innerText)")
    docs.click(f"{CHAT} .try button:not(.strong)")
    assert fake.gone.wait(PATIENCE_S)
    docs.wait(f"document.querySelector('{CHAT} .answer .note').innerText === 'Stopped.'")
    assert not docs.run(f"document.querySelector('{CHAT} .try button.strong').disabled")


def test_parameters_go_into_the_address(docs: Tab, fake: FakeServer) -> None:
    model = "#get-v1-models-model-"
    open_try(docs, model)
    docs.fill(f"{model} input", "x&y z")
    docs.fill(f"{model} input:last-of-type", "desc")
    assert json.loads(send(docs, model, "200 OK")) == {"id": "x&y z", "query": {"order": "desc"}}


def test_a_key_is_sent_with_it(browser: Browser, fake: FakeServer) -> None:
    fake.key = "secret-key"
    tab = browser.open(f"{fake.url}/docs")
    tab.wait("!document.getElementById('unlock').hidden")
    tab.fill("#key", "secret-key")
    tab.press("Enter")
    tab.wait("document.querySelector('.endpoint')")
    open_try(tab, CHAT)
    assert "[DONE]" in send(tab, CHAT, "all after")
    fake.key = "another"
    assert "no API key, or a wrong one" in send(tab, CHAT, "401")
    tab.wait("!document.getElementById('unlock').hidden")
    tab.close()


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_axe_finds_no_serious_issue(browser: Browser, fake: FakeServer, dark: bool, width: int) -> None:
    tab = browser.open()
    tab.look(width=width, height=800, dark=dark)
    tab.go(f"{fake.url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    assert serious(tab) == []
    open_try(tab, CHAT)
    send(tab, CHAT, "all after")
    tab.run(OPEN_ALL)
    assert serious(tab) == []
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints() == []
    tab.close()
