"""The chat page in a headless Chromium, driven by playwright; skipped where either is missing."""

import os
import shutil

import pytest

from running import Running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # Chromium refuses its sandbox to root.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Security" in message.text else None)
    yield page
    page.close()
    assert not problems


def say(page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def wait_for_answers(page, count: int) -> list[str]:
    """The texts of the assistant when the last of `count` is complete."""
    page.wait_for_function(
        "count => document.querySelectorAll('.assistant').length === count"
        " && document.getElementById('send').textContent === 'Send'",
        arg=count,
    )
    return [message.text_content() for message in page.locator(".assistant").all()]


def test_a_conversation_is_that_of_the_interface(server, page):
    page.goto(server.url)
    page.wait_for_function("() => document.title === 'tiny'")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens").fill("12")
    messages = []
    for count, text in enumerate(("hello <b>12</b>", "the"), 1):
        say(page, text)
        messages.append({"role": "user", "content": text})
        options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        expected = server.client.chat.completions.create(**options).choices[0].message.content
        assert wait_for_answers(page, count)[-1] == expected and expected
        messages.append({"role": "assistant", "content": expected})
    assert page.locator(".user").first.text_content() == "hello <b>12</b>"
    assert "tokens/s" in page.locator("#rate").text_content()
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_the_answer_is_shown_as_it_comes_and_can_be_stopped(server, page):
    page.goto(server.url)
    page.get_by_label("Tokens").fill("90")
    page.evaluate(
        "window.seen = new Set(); new MutationObserver(() => {"
        "  for (const m of document.querySelectorAll('.assistant')) seen.add(m.textContent.length) }"
        ").observe(document.getElementById('messages'), { childList: true, subtree: true, characterData: true })"
    )
    say(page, "hello")
    page.wait_for_function("() => seen.size > 1")
    # It may have ended in the meantime.
    page.evaluate("running?.abort()")
    wait_for_answers(page, 1)
    server.wait_idle()


def test_an_error_and_the_wish_for_a_key_are_shown(model, page):
    running = Running(model, XLA_ATTENTION_API_KEY="secret")
    try:
        page.goto(running.url)
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Tokens").fill("100000")
        say(page, "hello")
        assert "exceed" in page.locator(".error").nth(1).text_content()
        page.get_by_label("Tokens").fill("5")
        say(page, "hello")
        assert len(wait_for_answers(page, 1)) == 1
    finally:
        running.stop()
