"""The page in a real browser: by mouse, by keyboard, on a phone's width."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request

import pytest
from browser import Browser, needs_browser
from running import ANSWER, DEMO, running, stopped_after, until
from running import QUESTION as MESSAGES

from exkv import Job
from exkv.serve.hosting import ModelFolder, Prepared, ServeOptions
from exkv.serve.page import FILES
from exkv.serve.serving import Serving

QUESTION = MESSAGES[0]["content"]
#: Makes the page ask for long answers.
SLOWLY = """
  const real = window.fetch;
  window.fetch = (path, options) => real(path, !path.includes("chat") ? options : {...options,
    body: JSON.stringify({...JSON.parse(options.body),
      response_format: {type: "regex", pattern: "[bcdfghjkmpqvwxz]{900}"}})});
"""
DONE = "!document.querySelector('#stop:not([hidden])') && !!document.querySelector('#log nav')"


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("demo", "second"):
        shutil.copytree(DEMO, folder / name)
    prepared = Prepared(folder / "demo", ServeOptions(max_seq_len=1024, devices=("cpu",)))
    for _ in prepared.load():
        pass
    serving = Serving(prepared.serve(), folder=ModelFolder(folder))
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def address(serving):
    with running(serving) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, address):
    """The page at a first visit."""
    browser.first_visit()
    browser.screen(1280, 800)
    browser.open(address)
    browser.until("document.title !== 'exkv'")
    yield browser
    assert browser.complaints == []


def ask(page: Browser, text: str) -> str:
    """Send a message -> the answer."""
    page.run("document.getElementById('say').focus()")
    page.type(text)
    page.press("Enter")
    page.until(f"document.getElementById('say').value === '' && {DONE}")
    return page.text(".turn.assistant:last-child .text").strip()


# Files --------------------------------------------------------------------------------------------


def test_page_has_no_foreign_or_inline_code(address):
    for path in FILES:
        with urllib.request.urlopen(address + path) as answer:
            text, headers = answer.read().decode(), answer.headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert not re.findall(r"""(src|href)=["'](https?:|//)|@import|url\(|innerHTML""", text)
    assert {"/", "/page/main.js", "/page/style.css"} <= set(FILES)


# Conversations ------------------------------------------------------------------------------------


@needs_browser
def test_answer_streams_and_survives_a_reload(page, address):
    assert ask(page, QUESTION) == ANSWER
    assert re.search(r"8 tokens, \d+ tokens/s", page.text(".turn.assistant nav"))
    page.open(address)
    assert page.text(".turn.assistant .text").strip() == ANSWER
    assert page.text("#chats .name").startswith("Anna put the key")


@needs_browser
def test_answer_can_be_stopped_and_regenerated(page, serving):
    page.run(SLOWLY)
    page.type("tell me")
    with stopped_after(serving.loaded.engine, 60):
        page.press("Enter")
        page.until("document.querySelector('.turn.assistant .text').innerText.length > 5")
        page.until("document.querySelectorAll('#jobs tr').length === 2")  # its head, and the job
        page.until("!!document.querySelector('#pages .used')")
        page.press("Escape")
        page.until(DONE)
        until(lambda: serving.metrics.jobs == 0)
    assert "stopped" in page.text(".turn.assistant nav")
    assert 5 < len(page.text(".turn.assistant .text")) < 890
    page.run("window.fetch = real")
    page.click(".turn.assistant nav button:nth-child(2)")
    page.until("/^\\d+ token/.test(document.querySelector('.turn.assistant nav span')?.innerText)")


@needs_browser
def test_messages_are_edited_in_place(page):
    ask(page, QUESTION)
    ask(page, "Tom is in the garden. Where is Tom?")
    page.click(".turn.user nav button:nth-child(2)")
    assert page.run("document.activeElement.value") == QUESTION
    page.press("Escape")
    assert len(page.run("[...document.querySelectorAll('.turn')].map(e => e.className)")) == 4
    page.click(".turn.user nav button:nth-child(2)")
    page.run("document.activeElement.select()")
    page.type("Tom is in the garden. Where is Tom?")
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    said = "document.querySelector('.turn.assistant .text').innerText.trim()"
    page.until(f"{said} === 'Tom is in the garden.'")


@needs_browser
def test_keyboard_switches_conversations(page):
    ask(page, QUESTION)
    page.press("n", "KeyN", alt=True)
    assert ask(page, "Tom is in the garden. Where is Tom?") == "Tom is in the garden."
    page.press("ArrowDown", alt=True)
    assert page.text(".turn.assistant .text").strip() == ANSWER
    page.run("document.activeElement.blur()")
    page.press("/")
    assert page.run("document.activeElement.id") == "say"
    page.click("#chats li:nth-child(2) button:nth-child(2)")  # asks for confirmation: yes
    page.until("document.querySelectorAll('#chats li').length === 1")
    page.until(f"{STORED}.length === 1")


OTHER = "Tom is in the garden. Where is Tom?"
STORED = "Object.keys(localStorage).filter(key => key.startsWith('exkv.chat.'))"
NAMES = "[...document.querySelectorAll('#chats .name')].map(e => e.innerText)"


@needs_browser
def test_two_tabs_keep_each_others_conversations(page, address):
    page.run(SLOWLY)
    page.type("tell me")
    page.press("Enter")  # this tab stores its conversation every two seconds
    page.until("document.querySelector('.turn.assistant .text')?.innerText.length > 5")
    first = page.tab(address)
    page.press("n", "KeyN", alt=True)
    assert ask(page, OTHER) == "Tom is in the garden."
    second = page.use(first)
    page.until(f"{NAMES}.length === 2")
    page.press("Escape")
    page.until(DONE)
    page.run("window.fetch = real")
    ask(page, QUESTION)
    page.use(second)
    page.until(f"{NAMES}.length === 2 && {STORED}.length === 2")
    assert ask(page, QUESTION) == ANSWER
    assert page.text(".turn.user .text") == OTHER and "tell me" not in page.text("#log")
    page.open(address)
    lengths = f"{STORED}.map(key => JSON.parse(localStorage[key]).messages.length).sort()"
    assert page.run(lengths) == [4, 4]


@needs_browser
def test_concurrent_changes_in_two_tabs_are_both_kept(page, address):
    ask(page, QUESTION)
    first = page.tab(address)
    page.run(SLOWLY)
    page.type("here")
    page.press("Enter")
    page.until("document.querySelectorAll('.turn').length === 4")
    second = page.use(first)
    page.until("document.querySelectorAll('.turn').length === 4")
    page.run("window.fetch = () => Promise.reject(Error('no'))")
    page.type("there")
    page.press("Enter")
    page.until(f"{STORED}.length === 2")
    page.use(second)
    page.press("Escape")
    page.until(DONE)
    texts = (
        f"{STORED}.map(key => JSON.parse(localStorage[key]).messages.map(m => m.content).join())"
    )
    found = page.run(texts)
    assert sum("here" in text.split(",") for text in found) >= 1
    assert sum("there" in text.split(",") for text in found) == 1


@needs_browser
def test_regenerating_an_earlier_answer_forks_the_conversation(page):
    ask(page, QUESTION)
    ask(page, OTHER)
    page.click(".turn.assistant nav button:nth-child(2)")
    page.until(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    page.until(f"{NAMES}.length === 2 && {STORED}.length === 2")
    page.click("#chats li:nth-child(2) .name")
    page.until("document.querySelectorAll('.turn').length === 4")


@needs_browser
def test_unsent_text_stays_with_its_conversation(page):
    ask(page, QUESTION)
    page.type("half a")
    page.press("n", "KeyN", alt=True)
    assert page.run("document.getElementById('say').value") == ""
    page.press("ArrowDown", alt=True)
    assert page.run("document.getElementById('say').value") == "half a"


@needs_browser
def test_damaged_storage_is_ignored(page, address):
    good = {"role": "user", "content": "hello"}
    chats = [{"id": "a", "messages": [good, None, {"role": 1}, {"content": "x"}]}, {"id": "b"}, 7]
    page.run(f"localStorage['exkv.chats'] = {json.dumps(json.dumps(chats))}")  # the older format
    page.run("localStorage['exkv.chat.c'] = '{'; localStorage['exkv.chat.d'] = '[]'")
    page.open(address)
    assert page.run(NAMES)[-1:] == ["hello"]
    assert ask(page, QUESTION) == ANSWER


@needs_browser
def test_settings_are_sent(page):
    page.click("#settings summary")
    page.click("#max-tokens")
    page.type("3")
    answer = ask(page, QUESTION)
    assert answer == "The key is"
    assert "cut" in page.text(".turn.assistant nav")


# Output -------------------------------------------------------------------------------------------


def say(page: Browser, text: str) -> None:
    """Fake an answer of this text, in three pieces."""
    third = len(text) // 3 + 1
    parts = [text[at : at + third] for at in range(0, len(text), third)]
    choices = [{"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in parts]
    events = "".join(f"data: {each}\n\n" for each in (*map(json.dumps, choices), "[DONE]"))
    page.run(
        "window.fetch = async (path) => path.includes('chat') "
        f"? new Response({json.dumps(events)}) : Promise.reject(Error())"
    )
    ask(page, "hello")


REASONED = r"""
  const real = window.fetch;
  const event = (delta) => `data: ${JSON.stringify({choices: [{index: 0, delta}]})}\n\n`;
  window.sent = [];
  window.fetch = (path, options) => {
    if (!path.includes("chat")) return real(path, options);
    window.sent.push(JSON.parse(options.body).messages);
    return Promise.resolve(new Response(
      event({reasoning_content: "the <b>key"}) + event({content: "kitchen"}) + "data: [DONE]\n\n",
      {headers: {"content-type": "text/event-stream"}}));
  };
"""


@needs_browser
def test_reasoning_is_folded_and_not_sent_back(page):
    page.run(REASONED)
    ask(page, QUESTION)
    details = "document.querySelector('.turn.assistant details')"
    assert page.run(f"{details}.open") is False
    assert page.run(f"{details}.textContent") == "reasoningthe <b>key"
    page.click(".turn.assistant summary")
    assert page.run(f"{details}.open") is True
    ask(page, QUESTION)
    assert page.run("window.sent[1][1]") == {"role": "assistant", "content": "kitchen"}


@needs_browser
def test_hostile_output_stays_text(page):
    hostile = [
        "<script>window.hit = 1</script>",
        "<img src=x onerror='window.hit = 2'>",
        "[click](javascript:window.hit=3) ![p](data:text/html,x) [d](data:text/html,x)",
        "[x](https://e.org/\"onmouseover=\"window.hit=4) `<b>` **<i onclick=window.hit=5>x</i>**",
        "| <svg onload=window.hit=6> |\n| - |\n| <iframe srcdoc='<script>parent.hit=7</script>'> |",
        "```html\n<script>window.hit = 8</script>\n```",
        "> " * 3000 + "deep",
        "- x\n" + "".join("  " * depth + "- x\n" for depth in range(200)),
    ]  # fmt: skip
    say(page, "\n\n".join(hostile))
    found = "[...document.querySelectorAll('#log *')].map(e => e.tagName.toLowerCase())"
    allowed = {"div", "p", "pre", "code", "a", "ul", "ol", "li", "table", "tr", "th", "td"}
    allowed |= {"br", "strong", "em", "s", "nav", "button", "span", "blockquote", "tbody"}
    assert set(page.run(found)) <= allowed
    links = page.run("[...document.querySelectorAll('#log a')].map(e => [e.protocol, e.rel])")
    assert links and {(*link,) for link in links} <= {("https:", "noopener noreferrer")}
    assert "window.hit = 1" in page.text(".turn.assistant .text")
    # The policy would stop it even if it were parsed as HTML.
    refused = page.run(
        "(() => { const s = document.createElement('script');"
        "try { s.text = 'window.hit = 9'; document.body.append(s) } catch (e) { return e.name }})()"
    )
    assert refused == "TypeError"
    assert page.run("window.hit") is None
    page.complaints.clear()  # of that


@needs_browser
def test_markdown_is_rendered(page):
    say(
        page,
        "# Head\n\ntwo **bold** and `code`, *slanted* [site](https://e.org)\nnext line\n\n"
        "1. one\n2. two\n   - inner\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx = 1 < 2\n```",
    )
    text = "document.querySelector('.turn.assistant .text')"
    assert page.run(f"{text}.querySelector('h3').innerText") == "Head"
    assert page.run(f"{text}.querySelectorAll('ol > li').length") == 2
    assert page.run(f"{text}.querySelector('ol ul li').innerText") == "inner"
    assert page.run(f"{text}.querySelectorAll('td').length") == 2
    assert page.run(f"{text}.querySelector('pre').innerText") == "x = 1 < 2"
    assert page.run(f"{text}.querySelector('strong').innerText") == "bold"
    assert page.run(f"{text}.querySelectorAll('p br').length") == 1


# Memory and models --------------------------------------------------------------------------------


@needs_browser
def test_memory_bar_shows_the_plan(page, serving):
    engine = serving.loaded.engine  # of whatever model an earlier test left
    ledger = engine.model.report.devices[0].ledger
    page.until("!!document.querySelector('#devices .weights')")
    weights = page.run("document.querySelector('#devices .legend .weights').innerText")
    assert f"{ledger.weights / 2**20:.2f} MiB" in weights
    assert f"0 of {engine.pool.pages} in use" in page.text("#pages")


@needs_browser
def test_host_memory_has_a_bar(page, serving, address):
    engine = serving.loaded.engine
    handle = engine.submit(Job(prompt=[5] * 40))
    while not handle.tokens:
        engine.iterate()
    engine._scheduler._preempt(max(engine._running.jobs))
    page.open(address)
    page.until("document.querySelector('#host .bar .swapped')?.offsetWidth > 100")
    assert "1 job swapped out" in page.text("#host .legend")
    handle.cancel()
    engine.iterate()


@needs_browser
def test_model_is_planned_before_loading(page, serving):
    page.press("m", "KeyM", alt=True)
    page.until("!!document.querySelector('#plan .bar')")
    assert page.run("[...document.querySelectorAll('#which option')].map(o => o.value)") == [
        "demo", "second",
    ]  # fmt: skip
    page.run("which.value = 'second'; which.onchange()")
    page.run("cache.value = '8bit'; cache.onchange()")
    page.click("#length")
    page.type("512")
    page.until("/^512 tokens, 8bit/.test(document.querySelector('#plan small')?.innerText)")
    assert "It fits" in page.text("#plan")
    assert serving.loaded.name == "demo"
    page.until("!document.querySelector('#load').disabled")
    page.click("#load")
    page.until("document.querySelector('#model').textContent === 'second'")
    assert not page.run("models.open")
    assert serving.loaded.engine.max_tokens == 512
    assert ask(page, QUESTION) == ANSWER


@needs_browser
def test_plan_that_does_not_fit_cannot_be_loaded(page):
    page.press("m", "KeyM", alt=True)
    page.until("!!document.querySelector('#plan .bar')")
    page.click("#length")
    page.type("99999999")
    page.until("!!document.querySelector('#plan .error')")
    assert page.run("document.querySelector('#load').disabled")
    assert "No room for" in page.text("#plan") and "too much" in page.text("#plan")
    page.press("Escape")


# Keys, and small screens --------------------------------------------------------------------------


@needs_browser
def test_page_asks_for_the_key(browser, serving):
    guarded = Serving(serving.loaded, key="a-key-of-ours")
    with running(guarded) as address:
        browser.screen(1280, 800)
        browser.open(address)
        wrong = "!document.querySelector('#key-wrong').hidden"
        for key in ("wrong-one", "a-key-of-ours"):
            browser.until("document.querySelector('#key-dialog').open")
            browser.type(key)
            browser.press("Enter")
            browser.until(f"{wrong} || document.title !== 'exkv'")
        browser.until("document.title !== 'exkv'")
        assert not browser.run("document.querySelector('#key-dialog').open")
        assert ask(browser, QUESTION) == ANSWER
        assert browser.run("JSON.stringify(localStorage).includes('a-key')") is False
    browser.open("about:blank")


@needs_browser
def test_page_fits_a_phone(page):
    page.screen(390, 780)
    assert ask(page, QUESTION) == ANSWER
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.click("#show-state")
    page.until("document.querySelector('#state-pane').getBoundingClientRect().right <= 390")
    assert "weights" in page.text("#state-pane")
    page.click("#state-pane .hide")
    page.click("#show-chats")
    page.click("#new")
    page.until("document.querySelectorAll('.turn').length === 0")
    page.until("getComputedStyle(document.querySelector('#chats-pane')).visibility === 'hidden'")
