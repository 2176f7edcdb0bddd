"""What people do on the chat page, in a real browser: markdown, copying, stopping, answering again, editing, several
chats, settings, reasoning, keys; on a phone, in the dark; and what axe-core, a checker of accessibility, says."""

import json

import pytest

from tests.server.axe import LOOKS, serious
from tests.server.chromium import ALT, PATIENCE_S, Browser, Tab
from tests.server.page_server import MARKDOWN, WORDS, FakeServer, ask, needs_chromium, ready

ANSWER = "".join(WORDS)
pytestmark = needs_chromium


def copied(tab: Tab) -> list[str]:
    """From now on, what the page copies."""
    return list(tab.run("window.copied"))


def watch_clipboard(tab: Tab) -> None:
    tab.run(
        "window.copied = []; Object.defineProperty(navigator, 'clipboard', {value: "
        "{writeText: async (text) => { window.copied.push(text); }}, configurable: true}); 1"
    )


def press_button(tab: Tab, label: str, last: bool = True) -> None:
    """Click a button by the name that a screen reader says."""
    where = f"[aria-label={json.dumps(label)}]"
    tab.run(f"(() => {{ const all = document.querySelectorAll({json.dumps(where)});"
            f" all.forEach((one) => one.removeAttribute('data-here'));"
            f" all[{'all.length - 1' if last else '0'}].setAttribute('data-here', ''); }})()")  # fmt: skip
    tab.click(f"{where}[data-here]")


def finished(tab: Tab) -> None:
    tab.wait("document.getElementById('stop').hidden")


# ---- text


def test_markdown_is_rendered_and_nothing_in_it_runs_or_loads(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "markdown")
    text = ".turn.assistant .text"
    for selector, found in {
        "h3": "Fish", "em": "shoal", "strong": "fish", "p > code": "cod", "li": "one",
        "table td": "cod", "blockquote": "quoted <script>window.hacked = 3</script>",
    }.items():  # fmt: skip
        assert tab.texts(f"{text} {selector}")[0] == found, selector
    assert tab.text(f"{text} .code pre") == 'print("fish")\nfor fish in shoal: swim(fish)'
    assert tab.text(f"{text} .code .language") == "python"
    links = tab.run(
        f"[...document.querySelectorAll('{text} a')].map((one) => [one.innerText, one.getAttribute('href')])"
    )
    assert links == [
        ["here", "https://fish.example/a"], ["there", None], ["a fish", "https://elsewhere.example/fish.png"]
    ]  # fmt: skip
    assert tab.run(f"[...document.querySelectorAll('{text} a')].every((one) => one.rel.includes('noopener'))")
    assert tab.run(f"document.querySelectorAll('{text} img, {text} script').length") == 0
    assert tab.run("window.hacked === undefined")
    assert {url.split("/static")[0].split("/v1")[0].rstrip("/") for url in tab.requests()} == {fake.url}
    assert tab.complaints() == []


def test_an_answer_and_its_code_are_copied(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "markdown")
    watch_clipboard(tab)
    tab.run("window.setTimeout = () => 0; 1")  # the button says it only for a while
    press_button(tab, "Copy this code")
    tab.wait("document.querySelector('.code .copy').innerText === 'Copied'")
    press_button(tab, "Copy this answer")
    press_button(tab, "Copy this message")
    tab.wait("window.copied.length === 3")
    assert copied(tab) == ['print("fish")\nfor fish in shoal: swim(fish)', MARKDOWN, "markdown"]


def test_blocks_that_are_complete_are_not_drawn_again(tab: Tab) -> None:
    made = (
        "import('/static/chat-text.js').then(({ MarkdownView }) => { const box = document.createElement('div');"
        " const view = new MarkdownView(box); view.show('one\\n\\ntwo'); const first = box.firstChild;"
        " view.show('one\\n\\ntwo more\\n\\nthree'); return [box.firstChild === first, box.textContent]; })"
    )
    assert tab.run(made) == [True, "onetwo morethree"]


def test_reasoning_is_folded(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "reason")
    assert tab.text(".turn.assistant .text") == ANSWER
    assert tab.text(".reasoning > div") == ""
    tab.click(".reasoning summary")
    assert tab.text(".reasoning > div") == "Let me see"
    ask(tab, "hello")
    assert "reasoning" not in json.dumps(fake.asked[-1]["messages"][1]), "it is not sent back"
    assert tab.texts(".turn.assistant .by") == ["tiny-model"] * 2


# ---- again, edit, stop


def test_answering_again_replaces_the_last_answer(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    ask(tab, "second")
    assert tab.run("[...document.querySelectorAll('[aria-label=\"Answer again\"]')].map((one) => one.hidden)") == [
        True, False,
    ]  # fmt: skip
    press_button(tab, "Answer again")
    tab.wait("document.querySelectorAll('.turn').length === 4")
    finished(tab)
    assert [one["content"] for one in fake.asked[-1]["messages"]] == ["first", ANSWER, "second"]
    assert len(tab.texts(".turn")) == 4


def test_an_edited_message_takes_the_place_of_what_followed(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    ask(tab, "second")
    press_button(tab, "Edit this message", last=False)
    assert tab.run("document.activeElement.value") == "first"
    tab.type(" again")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    finished(tab)
    assert fake.asked[-1]["messages"] == [{"role": "user", "content": "first again"}]
    assert tab.texts(".turn.user .text") == ["first again"]
    assert tab.complaints() == []


def test_editing_can_be_cancelled(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    tab.click("#question")
    tab.press("ArrowUp")
    tab.wait("document.querySelector('.editor textarea')")
    tab.type("!")
    tab.press("Escape")
    assert tab.texts(".turn.user .text") == ["first"]
    assert tab.texts(".editor") == []
    assert len(fake.asked) == 1


def test_a_failed_second_try_leaves_the_conversation_as_it_was(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    tab.press("ArrowUp")
    tab.wait("document.querySelector('.editor textarea')")
    tab.run("document.querySelector('.editor textarea').value = 'full'")
    tab.press("Enter")
    tab.wait("!document.getElementById('problem').hidden")
    finished(tab)
    assert tab.texts(".turn.user .text") == ["first"]
    assert tab.texts(".turn.assistant .text") == [ANSWER]
    assert tab.run("document.getElementById('question').value") == "full"


def test_what_came_before_a_stop_is_kept(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "forever", whole=False)
    tab.wait("/more more/.test(document.querySelector('.turn.assistant .text').innerText)")
    tab.click("#stop")
    assert fake.gone.wait(PATIENCE_S)
    finished(tab)
    ask(tab, "hello")
    assert fake.asked[-1]["messages"][1]["content"].startswith("more more")


# ---- several conversations


def test_chats_are_there_after_a_reload(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    ask(tab, "second")
    tab.click("#fresh")
    ask(tab, "other")
    assert [text.splitlines()[0] for text in tab.texts("#chats li .open")] == ["other", "first"]
    tab.call("Page.reload")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    assert tab.texts(".turn.user .text") == ["other"]
    assert "tokens/s" in tab.text(".figures")
    tab.click("#chats li:last-child .open")
    assert tab.texts(".turn.user .text") == ["first", "second"]
    assert tab.run("document.querySelector('#chats [aria-current]').innerText") == "first"
    ready(tab)
    ask(tab, "third")
    assert [one["content"] for one in fake.asked[-1]["messages"]] == ["first", ANSWER, "second", ANSWER, "third"]
    assert tab.texts("#chats li .open")[0] == "first", "the newest stands first"
    tab.click("#chats li:first-child .remove")
    assert tab.texts("#chats li .open") == ["other"]
    assert tab.texts(".turn") == []
    assert tab.complaints() == []


def test_all_chats_can_be_deleted(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    tab.run("window.confirm = () => true; 1")
    tab.click("#clear")
    assert tab.texts(".turn") == tab.texts("#chats li") == []
    assert "first" not in tab.run("JSON.stringify(localStorage)")


def test_an_answer_goes_to_the_chat_that_asked_for_it(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    ask(tab, "forever", whole=False)
    tab.wait("/more more/.test([...document.querySelectorAll('.turn.assistant .text')].at(-1).innerText)")
    tab.click("#fresh")
    assert fake.gone.wait(PATIENCE_S)
    ask(tab, "hello")
    tab.click("#chats li:last-child .open")
    tab.wait("document.querySelectorAll('.turn').length === 4")
    assert tab.texts(".turn.assistant .text")[1].startswith("more more")


# ---- settings


def test_sampling_is_sent_as_it_was_set_and_kept(tab: Tab, fake: FakeServer) -> None:
    tab.click("#settings summary")
    values = {"system": "Be brief.", "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7}
    values |= {"repetition_penalty": 1.1, "max_tokens": 9}
    for name, value in values.items():
        tab.fill(f"#{name}", str(value))
    ask(tab, "hello")
    sent = fake.asked[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: sent[name] for name in values if name != "system"} == {
        name: value for name, value in values.items() if name != "system"
    }
    tab.call("Page.reload")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    assert tab.run("document.getElementById('top_k').value") == "20"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_chosen(tab: Tab, theme: str) -> None:
    tab.look(dark=theme == "light")  # the other one
    tab.run(f"(() => {{ const box = document.getElementById('theme'); box.value = '{theme}';"
            " box.dispatchEvent(new Event('input', {bubbles: true})); })()")  # fmt: skip
    ink = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(ink) == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}[theme]
    tab.call("Page.reload")
    tab.wait(f"document.documentElement?.dataset.theme === '{theme}'")  # none while the page loads


# ---- keys, a phone, accessibility


def test_the_keyboard_is_enough(tab: Tab, fake: FakeServer) -> None:
    ask(tab, "first")
    watch_clipboard(tab)
    tab.press("c", modifiers=ALT)
    tab.wait("window.copied.length === 1")
    assert copied(tab) == [ANSWER]
    tab.press("r", modifiers=ALT)
    tab.wait("!document.getElementById('stop').hidden || document.querySelectorAll('.turn').length === 2")
    finished(tab)
    assert len(fake.asked) == 2
    tab.press("s", modifiers=ALT)
    assert tab.run("document.activeElement.id") == "system"
    tab.press("Escape")
    assert not tab.run("document.getElementById('settings').open")
    tab.press("n", modifiers=ALT)
    assert tab.texts(".turn") == []
    tab.run("document.activeElement.blur()")
    tab.press("?")
    assert tab.run("document.getElementById('keys').open")
    assert "new chat" in tab.text("#keys")
    tab.press("Escape")
    tab.wait("!document.getElementById('keys').open")
    tab.run("document.activeElement.blur()")
    tab.press("/")
    assert tab.run("document.activeElement.id") == "question"
    assert tab.run("document.getElementById('question').value") == ""
    assert tab.complaints() == []


def test_on_a_phone_chats_are_in_a_drawer(browser: Browser, fake: FakeServer) -> None:
    tab = browser.open()
    tab.look(width=360, height=640)
    tab.go(f"{fake.url}/")
    ready(tab)
    ask(tab, "markdown")
    assert tab.run("document.documentElement.scrollWidth") <= 360
    assert tab.text("#side") == ""
    tab.click("#menu")
    assert tab.run("document.getElementById('menu').getAttribute('aria-expanded')") == "true"
    tab.click("#chats .open")
    assert tab.text("#side") == ""
    assert tab.run("document.documentElement.scrollWidth") <= 360
    assert tab.complaints() == []
    tab.close()


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_axe_finds_no_serious_issue(browser: Browser, fake: FakeServer, dark: bool, width: int) -> None:
    tab = browser.open()
    tab.look(width=width, height=800, dark=dark)
    tab.go(f"{fake.url}/")
    ready(tab)
    assert serious(tab) == []
    ask(tab, "markdown")
    ask(tab, "reason")
    tab.click(".turn:last-child .reasoning summary")
    tab.run("document.getElementById('settings').open = true")
    assert serious(tab) == []
    tab.run("document.getElementById('settings').open = false; document.getElementById('keys').showModal(); 1")
    assert serious(tab) == []
    tab.close()


def test_axe_sees_an_issue(tab: Tab) -> None:
    tab.run("document.body.append(document.createElement('img')); 1")
    assert serious(tab)
