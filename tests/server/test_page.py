"""The web page in headless Chromium. Skips where Chromium or playwright is missing."""

import os
import shutil

import pytest

from k3mlx.server.app import PAGE
from tests.server.conftest import until
from tests.text import marked

ANSWER = marked("Hm, let me see.)think·(response·Grüße 🚀 to <b>you</b> & all)response·)message·¶")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=[*arguments, "--disable-component-update"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    page = context.new_page()
    page.complaints = []
    page.on(
        "console", lambda message: page.complaints.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def until_page(page, condition):
    """Wait for what the page shows; its own policy forbids to evaluate scripts in it."""
    for _ in range(1500):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"this did not happen; the page shows {page.locator('body').inner_text()!r}")


def ends_with(locator, text):
    locator.wait_for(state="attached")
    until_page(locator.page, lambda: locator.text_content().endswith(text))


def shot(page, name):
    """A screenshot, where one is asked for."""
    if folder := os.environ.get("K3MLX_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


def test_send_stream_and_fold(page, scripted):
    served = scripted(ANSWER)
    served.backend.layer_seconds = 0.004
    page.goto(served.url)
    ends_with(page.locator("#model"), "test")
    ask(page, "Hello, <i>model</i>")
    page.wait_for_selector(".thoughts:not(:empty)", state="attached")
    seen = page.locator(".assistant .text").text_content()
    ends_with(page.locator(".assistant .text"), "all")
    assert len(seen) < len("Grüße 🚀 to <b>you</b> & all")  # it came bit by bit
    assert page.locator(".assistant .text").text_content() == "Grüße 🚀 to <b>you</b> & all"
    assert page.locator(".user").text_content() == "Hello, <i>model</i>"
    assert page.locator(".thoughts").text_content() == "Hm, let me see."
    assert not page.locator(".thoughts").is_visible()
    page.locator("summary").click()
    assert page.locator(".thoughts").is_visible()
    assert "Thought for" in page.locator("summary").text_content()
    until_page(page, lambda: page.locator("#speed").text_content() != "–")
    assert page.locator("#memory").text_content() != "–"
    until_page(page, page.locator("#send").is_enabled)
    shot(page, "answer")
    ask(page, "More")
    ends_with(page.locator(".assistant .text").nth(1), "all")
    assert all(url.startswith((served.url, "data:")) for url in page.asked)
    assert page.complaints == []


def test_stop_keeps_what_came_and_stops_the_work(page, scripted):
    served = scripted(marked(")think·(response·" + "word " * 900))
    served.backend.layer_seconds = 0.004
    page.goto(served.url)
    ask(page, "Go")
    until_page(page, lambda: len(page.locator(".assistant .text").text_content()) > 20)
    shot(page, "writing")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector("text=Stopped.")
    until_page(page, page.locator("#send").is_enabled)
    until(lambda: served.worker.running is None)
    assert page.locator(".assistant .text").text_content().startswith("word word")
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    assert page.complaints == []


def test_errors_are_shown(page, scripted):
    served = scripted(ANSWER, api_key="sesame")
    page.goto(served.url)
    ask(page, "Hello")
    page.wait_for_selector(".error")
    assert "expected the server's key" in page.locator(".error").text_content()
    page.get_by_label("Key").fill("sesame")
    page.locator("#prompt").press_sequentially("x" * 5)
    page.locator("#prompt").fill("y" * 7000)
    page.locator("#prompt").press("Enter")
    until_page(page, lambda: page.locator(".error").count() == 2)
    assert "expected at most 6000" in page.locator(".error").nth(1).text_content()
    assert page.locator(".error").nth(1).bounding_box()["y"] < 700  # in view, below a long question
    shot(page, "error")
    ask(page, "Hello")  # the questions that failed are not sent again
    ends_with(page.locator(".assistant .text").last, "all")


def test_settings_reach_the_server(page, scripted):
    served = scripted({"Nothing of the kind": ANSWER, "Be brief": marked("Yes)response·)message·¶")})
    page.goto(served.url)
    page.get_by_label("System prompt").fill("Be brief")
    page.get_by_label("Thinking").uncheck()
    page.get_by_label("Temperature").fill("0")
    ask(page, "Hello")
    ends_with(page.locator(".assistant .text"), "Yes")
    assert not page.locator("details").is_visible()
    page.get_by_label("Most tokens").fill("2")
    ask(page, "Again")
    page.wait_for_selector("text=The limit of tokens ended this answer.")


def test_on_a_phone_and_in_the_dark(browser, scripted):
    served = scripted(ANSWER)
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(served.url)
    ask(page, "Hello")
    ends_with(page.locator(".assistant .text"), "all")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#prompt").bounding_box()["y"] < 800
    shot(page, "phone")
    context.close()


def test_the_page_asks_nobody_else():
    text = PAGE.read_text("utf-8")
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
