"""The chat page and the API page, in a real browser, against a small server that speaks the real protocol.

Tests that ask for `base_url` alone hold for any server: SHOAL_PAGES_URL points them at one that runs.
"""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from tests.server.chromium import PATIENCE_S, SHIFT, Browser, Tab
from tests.server.page_server import (
    BROKEN,
    EVIL,
    FULL,
    LETTERS,
    STATIC,
    WORDS,
    FakeServer,
    ask,
    needs_chromium,
    ready,
)

# ---- chatting, with any server


@needs_chromium
def test_an_answer_streams_into_the_page_with_its_figures(tab: Tab) -> None:
    ask(tab, "hello")
    assert tab.texts(".turn.user .text") == ["hello"]
    assert len(tab.text(".turn.assistant .text")) > 0
    assert re.search(r"first token [\d.]+ m?s · [\d.]+ tokens/s · \d+ tokens", tab.text(".figures"))
    assert tab.run("document.activeElement.id") == "question"
    assert tab.complaints() == []


@needs_chromium
def test_the_page_names_the_model_it_talks_to(tab: Tab, base_url: str) -> None:
    model = httpx.get(f"{base_url}/v1/models").json()["data"][0]["id"]
    assert tab.run("document.getElementById('model').value") == model
    assert tab.run("document.title") == f"{model} · Shoal"


@needs_chromium
def test_a_new_chat_forgets_the_old_one(tab: Tab) -> None:
    ask(tab, "hello")
    tab.click("#fresh")
    assert tab.texts(".turn") == []
    assert "Ask something" in tab.text("#talk")


@needs_chromium
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_every_control_has_a_name(browser: Browser, base_url: str, path: str) -> None:
    tab = browser.open(f"{base_url}{path}")
    if path == "/":
        tab.click("#settings summary")
    names = tab.names("button", "textbox", "combobox", "link", "spinbutton", "DisclosureTriangle", "log")
    assert len(names) >= 3
    assert all(names), names
    tab.close()


@needs_chromium
@pytest.mark.parametrize("path", ["/", "/docs"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(360, 640), (1280, 800)], ids=["phone", "desk"])
def test_it_fits_every_screen_in_both_colours(
    browser: Browser, base_url: str, path: str, dark: bool, size: tuple[int, int], tmp_path: Path
) -> None:
    tab = browser.open()
    tab.look(width=size[0], height=size[1], dark=dark)
    tab.go(f"{base_url}{path}")
    if path == "/":
        ready(tab)
        ask(tab, "hello " + "and a long word: " + "x" * 300)
        tab.click("#settings summary")
    else:
        tab.wait("document.querySelector('.endpoint')")
    assert tab.run("document.documentElement.scrollWidth") <= size[0], "it must not scroll sideways"
    paper = [int(part) for part in re.findall(r"\d+", tab.run("getComputedStyle(document.body).backgroundColor"))]
    assert max(paper) < 60 if dark else min(paper) > 200
    assert tab.complaints() == []
    shots = Path(os.environ.get("SHOAL_PAGES_SHOTS", tmp_path))  # set it to look at them
    tab.shot(shots / f"{'docs' if path == '/docs' else 'chat'}-{'dark' if dark else 'light'}-{size[0]}.png")
    tab.close()


# ---- chatting, with a server that misbehaves on demand


@needs_chromium
def test_the_whole_conversation_is_sent_and_as_it_was_set(tab: Tab, fake: FakeServer) -> None:
    tab.click("#settings summary")
    tab.fill("#system", "Be brief.")
    tab.fill("#temperature", "0.5")
    tab.fill("#max_tokens", "6")
    ask(tab, "first")
    ask(tab, "second")
    assert tab.texts(".turn.assistant .text") == ["".join(WORDS)] * 2
    assert fake.asked[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "".join(WORDS)},
        {"role": "user", "content": "second"},
    ]
    assert (fake.asked[-1]["temperature"], fake.asked[-1]["max_tokens"]) == (0.5, 6)
    assert (fake.asked[-1]["model"], fake.asked[-1]["stream"]) == ("tiny-model", True)
    figures = tab.text(".figures")
    assert "6 tokens · 20 in the prompt, 16 of them cached · stopped at the limit" in figures
    tab.go(f"{fake.url}/")
    assert tab.run("document.getElementById('system').value") == "Be brief."
    ask(tab, "third")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["system", "user"]


@needs_chromium
def test_empty_settings_are_left_to_the_server(tab: Tab, fake: FakeServer) -> None:
    tab.click("#settings summary")
    tab.run("document.getElementById('max_tokens').value = ''")
    ask(tab, "hello")
    assert set(fake.asked[-1]) == {"model", "messages", "stream", "stream_options"}


@needs_chromium
def test_shift_and_enter_begin_a_new_line(tab: Tab, fake: FakeServer) -> None:
    tab.click("#question")
    tab.type("one")
    tab.press("Enter", modifiers=SHIFT)
    ask(tab, "two")
    assert fake.asked[-1]["messages"][-1]["content"] == "one\ntwo"
    tab.press("Enter")
    assert len(fake.asked) == 1, "an empty message is not sent"


@needs_chromium
def test_html_in_an_answer_or_a_question_is_text(tab: Tab, fake: FakeServer) -> None:
    fake.models = [EVIL, "another"]
    tab.go(f"{fake.url}/")
    tab.wait("document.getElementById('model').options.length === 2")
    ask(tab, EVIL)
    ask(tab, "html")
    assert tab.texts(".turn.user .text") == [EVIL, "html"]
    assert tab.texts(".turn.assistant .text")[1] == EVIL.replace("`", ""), "text, but for its markdown"
    assert tab.run("document.querySelectorAll('#talk b, #talk script, #talk .turn img').length") == 0
    assert tab.run("window.hacked === undefined")
    assert fake.asked[0]["model"] == EVIL
    assert tab.complaints() == []


@needs_chromium
def test_letters_may_arrive_byte_by_byte(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "letters")
    assert tab.text(".turn.assistant .text") == LETTERS
    assert tab.complaints() == []


@needs_chromium
@pytest.mark.parametrize("how", ["#stop", "Escape", "#fresh"])
def test_a_page_that_stops_reading_disconnects_from_the_server(tab: Tab, fake: FakeServer, how: str) -> None:
    ask(tab, "forever", whole=False)
    tab.wait("/tokens\\/s/.test(document.querySelector('.figures')?.innerText)")  # live, while it comes
    assert tab.run("document.getElementById('talk').getAttribute('aria-busy')") == "true"
    tab.type("typed meanwhile")
    tab.press("Enter")
    assert len(fake.asked) == 1, "one answer at a time"
    tab.press("Escape") if how == "Escape" else tab.click(how)
    assert fake.gone.wait(PATIENCE_S)
    tab.wait("document.getElementById('stop').hidden")
    assert tab.run("document.getElementById('question').value") == "typed meanwhile"
    if how == "#fresh":
        assert tab.texts(".turn") == []
    else:
        assert tab.text(".turn.assistant .text").startswith("more more")
        assert tab.text(".figures").endswith("stopped")
    tab.run("document.getElementById('question').value = ''")
    ask(tab, "hello")
    assert tab.texts(".turn.assistant .text")[-1] == "".join(WORDS)
    assert tab.complaints() == []


@needs_chromium
def test_a_refusal_is_shown_and_the_question_is_not_lost(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "full")
    assert FULL["message"] in tab.text("#problem")
    assert "429. Try again in 3 s." in tab.text("#problem")
    assert tab.texts(".turn") == []
    assert tab.run("document.getElementById('question').value") == "full"
    assert tab.complaints(network=False) == []
    tab.run("document.getElementById('question').value = ''")
    ask(tab, "hello")
    assert not tab.text("#problem")
    assert [one["content"] for one in fake.asked[-1]["messages"]] == ["hello"]


@needs_chromium
@pytest.mark.parametrize(
    ("word", "told"), [("break", BROKEN["message"]), ("cut", "The connection ended before the answer did.")]
)
def test_an_answer_that_breaks_off_keeps_what_came(tab: Tab, fake: FakeServer, word: str, told: str) -> None:
    ask(tab, word)
    assert told in tab.text("#problem")
    assert tab.text(".turn.assistant .text") == "".join(WORDS[:2]).strip()
    ask(tab, "hello")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["user", "assistant", "user"]
    assert tab.complaints() == []


@needs_chromium
def test_an_empty_answer_is_an_answer(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "nothing")
    assert len(tab.texts(".turn")) == 2
    ask(tab, "hello")
    assert [one["role"] for one in fake.asked[-1]["messages"]] == ["user", "assistant", "user"]


@needs_chromium
def test_an_error_that_is_not_json_is_shown_as_text(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "not json")
    assert "<h1>Bad gateway</h1>" in tab.text("#problem")
    assert "The server answered 502." in tab.text("#problem")


@needs_chromium
def test_a_key_is_asked_for_sent_and_kept_in_the_tab(browser: Browser, fake: FakeServer) -> None:
    fake.key = "secret-key"
    tab = browser.open(f"{fake.url}/")
    tab.wait("!document.getElementById('problem').hidden")
    assert "no API key, or a wrong one" in tab.text("#problem")
    assert "Enter the API key under Settings." in tab.text("#problem")
    tab.fill("#key", "secret-key")
    tab.press("Tab")
    tab.wait("document.getElementById('model').value === 'tiny-model'")
    assert not tab.text("#problem")
    ask(tab, "hello")
    assert tab.text(".turn.assistant .text") == "".join(WORDS)
    tab.go(f"{fake.url}/docs")
    tab.wait("document.querySelector('.endpoint')")
    assert "secret-key" not in tab.run("JSON.stringify(localStorage)")
    tab.close()
    other = browser.open(f"{fake.url}/docs")
    other.wait("!document.getElementById('problem').hidden")
    other.fill("#key", "secret-key")
    other.press("Enter")
    other.wait("document.querySelector('.endpoint')")
    other.close()


@needs_chromium
def test_a_lost_connection_is_shown(browser: Browser) -> None:
    server = FakeServer()
    tab = browser.open(f"{server.url}/")
    tab.wait("document.getElementById('model').value === 'tiny-model'")
    server.close()
    ask(tab, "hello")
    assert "The connection to the server was lost." in tab.text("#problem")
    tab.close()


# ---- the files themselves


class Reader(HTMLParser):
    """Collects tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


PAGES = sorted(STATIC.glob("*.html"))


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_a_page_holds_no_script_no_style_and_nothing_from_elsewhere(path: Path) -> None:
    tags = Reader(path.read_text()).tags
    for tag, attrs in tags:
        assert tag != "style"
        assert tag != "script" or "src" in attrs
        assert not [name for name in attrs if name.startswith("on") or name == "style"], f"{tag} {attrs}"
        for link in (attrs.get("src"), attrs.get("href")):
            if link and link.startswith("static/"):
                assert (STATIC / link.removeprefix("static/")).is_file()
    labelled = {attrs["for"] for tag, attrs in tags if tag == "label"}
    labelled |= {attrs.get("id") for _, attrs in tags if attrs.get("aria-label")}
    assert {attrs["id"] for tag, attrs in tags if tag in ("input", "textarea", "select")} <= labelled


def test_no_file_asks_another_host_or_writes_html() -> None:
    files = [path for path in STATIC.iterdir() if path.is_file() and not path.name.startswith("vendor-")]
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        text = re.sub(r'^import .* from "\./[a-z-]+\.js";$', "", text, flags=re.MULTILINE)  # of a file beside it
        found = re.findall(
            r"https?:|@import|\burl\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bimport\b", text
        )
        assert not found, f"{path.name}: {found}"


def test_the_files_are_part_of_the_package() -> None:
    project = (STATIC.parents[3] / "pyproject.toml").read_text()
    assert re.search(r'^shoal = \[.*"server/static/\*".*\]$', project, re.MULTILINE)


def test_vendored_libraries_are_named_with_version_and_licence() -> None:
    readme = (STATIC.parents[3] / "README.md").read_text()
    licences = (STATIC / "vendor-licenses.txt").read_text()
    for path in STATIC.glob("vendor-*.js"):
        head = path.read_text()[:400]
        name, version = re.findall(r"(marked|DOMPurify) v?([\d.]+\d)", head)[0]
        assert f"{name} {version}" in readme
        assert f"{name} {version}" in licences
        assert "sourceMappingURL" not in path.read_text()
