"""The page to chat with a model, in a real browser."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nanoengine import AsyncLLM
from tests.browser import seen_at
from tests.helpers import DEMO, THINKING_TEMPLATE, chain_checkpoint, thinking_checkpoint
from tests.serving import held_steps, is_empty, served, wait_until

MARKUP = "<b id=x>"


@pytest.fixture
def browser(chromium):
    """Yield a browser on a narrow screen."""
    with seen_at(chromium, 390):
        chromium.get_log("browser")  # of other tests
        yield chromium


@pytest.fixture
def page(browser, serving):
    browser.get(serving[0])
    yield browser
    # Nothing failed and nothing was blocked; and nothing was asked for anywhere else.
    wrong = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in wrong if "status of 4" not in line["message"]] == []
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert all(name.startswith((serving[0], "data:")) for name in asked)


def find(page, selector):
    return page.find_elements(By.CSS_SELECTOR, selector)


def texts(page, selector):
    return [element.get_attribute("textContent") for element in find(page, selector)]


def write(page, text):
    page.find_element(By.ID, "text").send_keys(text)


def press_send(page):
    page.find_element(By.ID, "send").click()


def bodies_sent_to(service, monkeypatch):
    """Return a list that grows by the body of each request."""
    bodies, answer = [], service.answer
    noted = lambda body, ticket: (bodies.append(body), answer(body, ticket))[1]  # noqa: E731
    monkeypatch.setattr(service, "answer", noted)
    return bodies


def test_a_question_is_answered_and_sent_again_with_the_next_one(page, serving, monkeypatch):
    bodies = bodies_sent_to(serving[1], monkeypatch)
    wait_until(lambda: texts(page, "#model") == ["demo"])
    page.find_element(By.CSS_SELECTOR, "summary").click()
    page.find_element(By.ID, "temperature").send_keys("0")
    write(page, "What is 27 + 58?")
    press_send(page)
    wait_until(lambda: len(find(page, ".note")) == 1)
    assert texts(page, ".message") == ["What is 27 + 58?", "27 + 58 = 85"]
    assert texts(page, ".note")[0].startswith("13 tokens in ")
    write(page, "What is 3 + 4?" + Keys.ENTER)
    wait_until(lambda: len(find(page, ".note")) == 2)
    sent = [one["content"] for one in bodies[1].messages]
    assert sent == ["What is 27 + 58?", "27 + 58 = 85", "What is 3 + 4?"]
    page.find_element(By.ID, "new").click()
    wait_until(lambda: find(page, ".message") == [])


def test_an_answer_is_streamed_and_stop_also_ends_it_on_the_server(page, serving):
    _, service = serving
    with held_steps(service.engine) as steps:
        write(page, "Count from 1 to 90." + Keys.ENTER)
        wait_until(lambda: len(find(page, ".message")) == 2)
        for _ in range(4):
            before = texts(page, ".message")[-1]
            steps.permit(1)
            wait_until(lambda before=before: len(texts(page, ".message")[-1]) > len(before))
        assert page.find_element(By.ID, "send").text == "Stop"
        press_send(page)
        wait_until(lambda: service.num_samples == 0)
        begun = steps.num_begun
        steps.permit()
        wait_until(lambda: is_empty(service))
        assert steps.num_begun == begun
    wait_until(lambda: texts(page, ".note") == ["stopped"])
    assert page.find_element(By.ID, "send").text == "Send"
    assert find(page, ".running") == []


def test_a_new_chat_can_begin_during_an_answer(page, serving):
    with held_steps(serving[1].engine):
        write(page, "Count from 1 to 90." + Keys.ENTER)
        wait_until(lambda: len(find(page, ".message")) == 2)
        page.find_element(By.ID, "new").click()
        wait_until(lambda: find(page, ".message") + find(page, ".note") == [])
    assert page.execute_script("return messages.length") == 0


def test_an_error_is_shown_and_the_question_is_kept(page, serving):
    page.find_element(By.CSS_SELECTOR, "summary").click()
    tokens = page.find_element(By.ID, "tokens")
    page.execute_script("arguments[0].value = '2.5'", tokens)  # a browser would not send it
    page.execute_script("document.getElementById('form').noValidate = true")
    write(page, "hello")
    press_send(page)
    wait_until(lambda: find(page, ".error"))
    assert "max_tokens" in texts(page, ".error")[0]
    assert page.find_element(By.ID, "text").get_attribute("value") == "hello"
    assert find(page, ".message") == []


def test_text_of_users_and_models_is_never_html(browser, tmp_path):
    engine = AsyncLLM(str(chain_checkpoint(tmp_path, MARKUP)), num_kv_blocks=100)
    with served(engine) as (url, service):
        service.checkpoint.tokenizer.chat_template = "{{ messages[-1]['content'] }}"
        browser.get(url)
        find(browser, "summary")[0].click()
        browser.find_element(By.ID, "tokens").send_keys("24")
        write(browser, MARKUP + Keys.ENTER)
        wait_until(lambda: texts(browser, ".note"))
        assert texts(browser, ".message") == [MARKUP, MARKUP * 3]
        assert find(browser, "#x") == []


def test_the_page_asks_for_a_key_and_sends_it(browser):
    with served(AsyncLLM(str(DEMO), num_kv_blocks=50), api_key="k") as (url, _):
        browser.get(url)
        wait_until(lambda: find(browser, ".error"))
        assert "API key" in texts(browser, ".error")[0]
        browser.find_element(By.ID, "key").send_keys("k" + Keys.TAB)
        wait_until(lambda: texts(browser, "#model") == ["demo"])


CODE = "Add `a` and `b`:\n\n```python\ndef f(a, b):\n    return a + b\n```\n\nor:\n```\n1 + 2\n```"


def test_code_is_in_monospace_in_whatever_pieces_it_arrives(page):
    in_pieces = "for (let end = 0; end <= text.length; end++) write(element, text.slice(0, end))"
    page.execute_script(f"const element = show('message', ''), text = arguments[0]; {in_pieces}", CODE)
    assert texts(page, ".message pre") == ["def f(a, b):\n    return a + b\n", "1 + 2\n"]
    assert texts(page, ".message code") == ["a", "b"]
    assert texts(page, ".message") == ["Add a and b:\n\ndef f(a, b):\n    return a + b\n\nor:\n1 + 2\n"]


def test_thoughts_are_folded_and_temperature_is_the_checkpoint_s_or_moderate(browser, tmp_path, monkeypatch):
    engine = AsyncLLM(str(thinking_checkpoint(tmp_path)), num_kv_blocks=100)
    engine.llm_engine.checkpoint.tokenizer.chat_template = THINKING_TEMPLATE
    with served(engine) as (url, service):
        bodies = bodies_sent_to(service, monkeypatch)
        browser.get(url)
        find(browser, "summary")[0].click()
        browser.find_element(By.ID, "tokens").send_keys("6")
        for number in (1, 2):
            write(browser, "o" + Keys.ENTER)
            wait_until(lambda number=number: len(texts(browser, ".note")) == number)
        assert texts(browser, ".message") == ["o", "So"] * 2
        assert texts(browser, ".thoughts > div") == ["hm"] * 2
        assert not find(browser, ".thoughts > div")[0].is_displayed()
        assert bodies[1].messages[1]["content"] == "So"
        assert bodies[1].temperature == 0.7
        monkeypatch.setitem(service.checkpoint.generation_config, "temperature", 0.3)
        service.defaults.temperature = 0.3
        browser.get(url)
        assert browser.find_element(By.ID, "temperature").get_attribute("placeholder") == "0.3"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_fits_its_window(width, browser, serving):
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 800}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(serving[0])
    find(browser, "summary")[0].click()
    browser.execute_script("show('message user', 'x'.repeat(500))")
    browser.execute_script(
        "write(show('message', ''), `${'a '.repeat(2000)}\\n\\`\\`\\`\\n${'x'.repeat(900)}`)"
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert all(0 <= find(browser, name)[0].rect["y"] < 700 for name in ("#text", "#send", "#new", "#key"))
