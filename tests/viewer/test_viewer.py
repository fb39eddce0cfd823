"""The page of a trace, in a real browser: what it shows is what the engine did."""

import functools
import inspect
import json
import random
import re
import shutil
import signal
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nanoengine import LLM, SamplingParams, engine
from nanoengine.cli import run
from nanoengine.engine import BlockManager, Scheduler
from nanoengine.extensions.sliding_windows import WindowedBlockManager
from nanoengine.extensions.speculative_decoding import DraftingScheduler
from nanoengine.extensions.trace import Tracer
from nanoengine.viewer import trace_page as viewer
from tests.browser import seen_at
from tests.extensions.test_receipt import LIMITS
from tests.helpers import DEMO, finish, is_busy, make_scheduler, make_sequence, run_step
from tests.laws import tables_of
from tests.serving import wait_until

ROOT = Path(__file__).parents[2]
COMMAND = "nanoengine run --trace docs/run.html"


def events_of(page: str) -> list:
    """Return the trace that a page holds."""
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    events: list = json.loads(found[1])
    return events


def small_run() -> list:
    """Run four steps that can be followed by hand, with 5 blocks of 2 tokens."""
    events: list = []
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=6)
    tracer = Tracer(scheduler, events.append)
    for seq_id, (prompt, max_tokens) in enumerate([([1, 2], 4), ([1, 2], 4), ([5, 6, 7], 2)]):
        scheduler.add(make_sequence(seq_id, prompt, max_tokens=max_tokens))
    for token in (8, 9, 8, 9, 8, 9):
        run_step(scheduler, token)
        tracer.end_step()
    tracer.close()
    return events


@pytest.fixture
def browser(chromium):
    chromium.get_log("browser")  # of other tests
    return chromium


@pytest.fixture(scope="module")
def recorded_page(tmp_path_factory):
    """Return the page that lessons link to, created beside a copy of them by the command they name."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("run.html"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # what is set for a process of its own
        patch.setattr("nanoengine.extensions.receipt.measure_limits", lambda *_: LIMITS)
        patch.chdir(folder)
        run.main(COMMAND.split()[2:])
    return folder / "docs" / "run.html"


@pytest.fixture
def open_page(browser, tmp_path):
    """Open the page of some events. At the end of the test, its console must be empty."""

    def open_page(events):
        path = tmp_path / "run.html"
        viewer.save(events, path)
        browser.get(path.as_uri())
        return browser

    yield open_page
    assert browser.get_log("browser") == []
    browser.get("about:blank")


PROBES = Path(__file__).with_name("probes.js").read_text()


def probe(browser, function: str, *arguments) -> Any:
    """Call a function of probes.js in the page. Returns what it returns."""
    return browser.execute_script(f"{PROBES}\nreturn {function}(...arguments)", *arguments)


def press(browser, key: str) -> None:
    ActionChains(browser).send_keys(key).perform()


def text_of(browser, element_id: str) -> str:
    return str(browser.find_element(By.ID, element_id).text)


def labels(browser) -> list[str]:
    """Return the label of each block, from block 1 on."""
    cells = browser.find_elements(By.CSS_SELECTOR, "#pool .cell")
    return [cell.get_attribute("aria-label") for cell in cells]


def queue(browser, element_id: str) -> list[str]:
    return [chip.text for chip in browser.find_elements(By.CSS_SELECTOR, f"#{element_id} .seq")]


# By hand: words of the headline, the running sequences, and blocks of each kind
STEPS: dict[int, tuple[str, list[str], set[str]]] = {
    1: (
        "B's prompt hits block 1, which A computed: 1 of its 2 tokens need not be computed.",
        ["A", "B", "C"],
        {
            "Block 1, held by A, B, ref count 2, 2 of 2 tokens, cached",
            "Block 3, held by C, ref count 1, 1 of 2 tokens",
            "Block 4, free, empty",
        },
    ),
    # A and B take 4 and 5; C's fifth token was its last
    2: ("C has reached its length limit.", ["A", "B"], {"Block 2, free, still cached, computed by C"}),
    # both need a third block at once: the free ones hold what C left
    4: ("so the content of block 3 (computed by C) is evicted", [], {"Block 3, free, empty"}),
}


def check(browser, step: int) -> None:
    headline, running, blocks = STEPS[step]
    assert text_of(browser, "number") == str(step)
    assert headline in text_of(browser, "headline")
    assert queue(browser, "running") == running
    assert blocks <= {*labels(browser)}


def test_the_page_shows_the_right_owners_forwards_backwards_and_while_it_plays(open_page):
    browser = open_page(small_run())
    check(browser, 1)
    enabled = {name: browser.find_element(By.ID, name).is_enabled() for name in ("event", "hit", "eviction")}
    assert enabled == {"event": True, "hit": False, "eviction": True}  # the only hit is in step 1
    keys = [("e", 4), ("p", 4), (Keys.HOME, 1), (Keys.ARROW_RIGHT, 2), ("forward", 3), ("event", 4)]
    keys += [(Keys.ARROW_LEFT, 3), (Keys.ARROW_LEFT, 2), ("back", 1), (Keys.END, 4)]
    for key, number in keys:
        if len(key) == 1:
            press(browser, key)
        else:
            browser.find_element(By.ID, key).click()
        if number in STEPS:
            check(browser, number)
    assert not any(browser.find_element(By.ID, name).is_enabled() for name in ("eviction", "forward"))
    press(browser, Keys.HOME)
    browser.execute_script("document.getElementById('speed').value = '60'")
    press(browser, Keys.SPACE)
    wait_until(lambda: text_of(browser, "number") == "4")
    check(browser, 4)
    assert browser.find_element(By.ID, "play").get_attribute("aria-label") == "Play"


def test_a_block_shows_its_content_and_chain_to_mouse_and_keyboard(open_page):
    browser = open_page(small_run())
    press(browser, Keys.ARROW_RIGHT)
    cells = browser.find_elements(By.CSS_SELECTOR, "#pool .cell")
    ActionChains(browser).move_to_element(cells[2]).perform()
    of_block_3 = text_of(browser, "detail")
    assert of_block_3.startswith("Block 3 is free: number 1 of 2 in the order of eviction.")
    assert "Tokens 2 to 3 of C, cached:\n#7#8\nPosition 2 of C: slot = 3 * 2 + 2 % 2 = 6\n" in of_block_3
    assert of_block_3.endswith("after the blocks before it: 2 → 3.")
    browser.execute_script("arguments[0].focus()", cells[0])
    assert text_of(browser, "detail").startswith("Block 1 is held by A and B (ref count 2).\nTokens 0 to 1")
    press(browser, Keys.ARROW_RIGHT * 2)
    assert text_of(browser, "detail") == of_block_3
    assert text_of(browser, "number") == "2"  # the arrows moved between blocks, not along the timeline
    press(browser, Keys.ARROW_RIGHT)
    assert "block_table[2 // 2] = block_table[1] = 4, slot = 4 * 2 + 2 % 2 = 8" in text_of(browser, "detail")
    browser.find_elements(By.CSS_SELECTOR, "#detail [data-position]")[1].click()
    assert "block_table[3 // 2] = block_table[1] = 4, slot = 4 * 2 + 3 % 2 = 9" in text_of(browser, "slot")


def test_no_text_of_a_prompt_can_become_part_of_the_page(open_page):
    evil = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    events: list = []
    with LLM(DEMO, num_kv_blocks=40, block_size=4, trace=events.append) as llm:
        llm.add_request(evil, evil, SamplingParams(max_tokens=2))
        finish(llm)
    drawn = next(change for change in events[1]["changes"] if change["change"] == "tokens")["tokens"][0]
    events[0]["model"] = events[1]["texts"][str(drawn["token_ids"][0])] = evil
    browser = open_page(events)
    assert browser.title == "nanoengine, step by step"
    assert evil in text_of(browser, "rest")
    assert browser.execute_script("return document.scripts.length") == 5
    events[1]["changes"].insert(0, {"change": "fail", "error": evil})
    browser = open_page(events)
    assert evil in text_of(browser, "headline")
    assert browser.title == "nanoengine, step by step"


def windows_and_drafts() -> list:
    """Run with blocks of 2, full attention and a window of 3. Once, one of three draft tokens is accepted."""
    events: list = []
    scheduler = DraftingScheduler(
        WindowedBlockManager(20, 2, windows=(None, 3), max_chunk_tokens=4),
        max_num_batched_tokens=4,
        propose=lambda seq, num_tokens: [9, 5, 6][:num_tokens] if len(seq.token_ids) < 9 else [],
    )
    tracer = Tracer(scheduler, events.append)
    scheduler.add(make_sequence(0, [*range(7)], max_tokens=6))
    for _ in range(5):
        run_step(scheduler, 9)
        tracer.end_step()
    return events


def test_the_page_describes_windows_and_drafts_and_shows_a_table_per_group(open_page):
    browser = open_page(windows_and_drafts())
    press(browser, Keys.ARROW_RIGHT)
    assert text_of(browser, "groups").startswith("g1 sees all tokens\ng2 sees the last 3 tokens\n")
    assert text_of(browser, "headline").startswith("Block 5 is outside the sliding window of A")
    assert labels(browser)[4] == "Block 5, free, still cached, computed by A, group g2"
    tables = browser.find_elements(By.CSS_SELECTOR, "#running .table")
    assert [table.text for table in tables] == ["g1 blocks 1 2 3 4", "g2 blocks 6 7 8"]
    hatched = [len(table.find_elements(By.CSS_SELECTOR, ".gone")) for table in tables]
    assert hatched == [0, 1]
    press(browser, Keys.ARROW_RIGHT)
    assert text_of(browser, "headline").startswith("1 of 3 draft tokens of A (#9#5#6) is accepted")
    assert text_of(browser, "batch-count") == "0 prefill + 1 decode + 3 drafts of 4 tokens"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#batch .draft")) == 3
    assert labels(browser)[8] == "Block 9, held by A, ref count 1, 1 of 2 tokens, group g1"  # the accepted


def random_run(scheduler, num_steps=30, chaos=False, on_step=lambda events: None) -> list:
    """Three sequences arrive every other step; their tokens depend on the position alone.

    With chaos, steps fail, sequences are aborted and the prefix cache is reset.
    """
    rng = random.Random(5)
    events: list = []
    tracer = Tracer(scheduler, events.append)
    beginnings = [[rng.randrange(9) for _ in range(16)] for _ in range(2)]
    step = 0
    while step < num_steps or is_busy(scheduler):
        for i in range(3 if step < num_steps and step % 2 == 0 else 0):
            prompt = rng.choice(beginnings)[: rng.randrange(1, 17)]
            prompt += [rng.randrange(9) for _ in range(rng.randrange(9))]
            priority, max_tokens = rng.choice([0, 0, 1]), rng.randrange(1, 20)
            scheduler.add(make_sequence(3 * step // 2 + i, prompt, priority, max_tokens=max_tokens))
        step += 1
        batch = scheduler.schedule()
        if chaos and step % 47 == 0:
            scheduler.recover()
        else:
            scheduler.update(batch, [seq.seq_id * seq.num_tokens % 7 for seq in batch.sampled_seqs])
        if chaos and step % 31 == 0 and scheduler.running:
            scheduler.finish(rng.choice(scheduler.running), "abort")
        if chaos:
            scheduler.block_manager.reset_prefix_cache()
        tracer.end_step()
        on_step(events)
    return events


@pytest.mark.parametrize("windows", [(None,), (None, 10)])
def test_the_page_shows_the_engine_s_state_at_any_step_it_jumps_to(open_page, windows):
    """Preemptions, priorities, aborts, a failed step and a reset: the page replays them as the engine did."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 24}
    scheduler: Any = Scheduler(BlockManager(13, 4), **limits)
    if windows != (None,):
        blocks = WindowedBlockManager(32, 4, windows=windows, max_chunk_tokens=24)
        scheduler = DraftingScheduler(blocks, lambda seq, n: [seq.num_tokens % 7] * min(2, n), **limits)
    expected: list = []

    def note(events):
        if len(events) > len(expected) + 1:
            blocks, running = scheduler.block_manager, scheduler.running
            expected.append([
                [block.ref_count for block in blocks.blocks],
                [[seq.seq_id, [list(table) for table in tables_of(blocks, seq)]] for seq in running],
                [seq.num_computed_tokens for seq in running],
                [seq.seq_id for seq in scheduler.waiting],
                [block.block_id for block in blocks.free_blocks.values() if block.prefix is None],
                [block.block_id for block in blocks.free_blocks.values() if block.prefix is not None],
                [scheduler.num_preemptions, blocks.num_query_hits, blocks.num_query_tokens],
            ])  # fmt: skip

    events = random_run(scheduler, 60, chaos=True, on_step=note)
    assert scheduler.num_preemptions > 20
    browser = open_page(events)
    order = random.Random(1).sample(range(len(expected)), 60) + list(range(100, 160))
    for index, of_page in zip(order, probe(browser, "statesAfter", order), strict=True):
        assert of_page == expected[index], f"after step {index + 1}"


def test_five_thousand_steps_stay_responsive(open_page):
    events = random_run(make_scheduler(128, block_size=8, max_num_seqs=24, max_num_batched_tokens=64), 5000)
    browser = open_page(events)
    assert text_of(browser, "of") == f"of {len(events) - 1}"
    forward, jump = probe(browser, "timesOfSteps")
    print(f"5000 steps: {forward:.1f} ms a step forward, {jump:.1f} ms a jump, medians")
    assert forward < 150, "on an idle machine a tenth of it"
    assert jump < 400
    browser.execute_script("show(4998)")
    seen = events[4999]
    assert len(queue(browser, "running")) == seen["num_running"] > 0
    assert text_of(browser, "use-now") == f"{128 - seen['num_free_blocks']} of 128"


def test_the_line_of_the_engine_that_acted_is_a_line_of_the_engine():
    words = json.loads(viewer.PAGE.joinpath("words.json").read_text())
    for symbol, line, *_ in [*words["code"].values(), *words["inputs"].values()]:
        source = inspect.getsource(functools.reduce(getattr, symbol.split("."), engine))
        assert line in (one.strip() for one in source.splitlines()), symbol
    story = viewer.PAGE.joinpath("story.js").read_text()
    assert all(f'"{name}"' in story for name in words["code"])


def scheduled(num_blocks: int, max_num_batched_tokens: int) -> list:
    scheduler = make_scheduler(num_blocks, max_num_seqs=7, max_num_batched_tokens=max_num_batched_tokens)
    return random_run(scheduler)


def test_the_page_replays_what_the_engine_does(open_page):
    browser = open_page(scheduled(24, 24))
    assert browser.find_element(By.ID, "whatif").is_displayed()
    for limits in (24, 24), (13, 24), (40, 9), (14, 3), (90, 60):
        expected = [event["changes"] for event in scheduled(*limits)[1:]]
        played = browser.execute_script("return replay(...arguments).slice(1).map(x => x.changes)", *limits)
        for change in [change for changes in expected + played for change in changes]:
            change.pop("max_num_tokens", None)  # of the pool: the answers fit into any of these
        assert played == expected, limits
    assert sum(change.get("why") == "preempted" for step in expected for change in step) == 0
    small = browser.execute_script("return summary(replay(13, 24))")
    assert small["preemptions"] > 5
    browser.execute_script("blocks.value = '13'; blocks.dispatchEvent(new Event('input'))")
    assert text_of(browser, "pool-count").endswith("empty")
    assert len(labels(browser)) == 13
    before = browser.execute_script("return summary(recorded).preemptions")
    assert f"preemptions {before} {small['preemptions']}" in text_of(browser, "compared")
    browser.find_element(By.ID, "recorded").click()
    assert len(labels(browser)) == 24


def test_the_command_builds_a_page_that_shows_everything_and_links_to_the_lessons(open_page, recorded_page):
    page = recorded_page.read_text()
    events = events_of(page)
    (receipt,) = re.findall("<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    assert viewer.page(events, ".md", receipt=unescape(receipt)) == page
    assert "decodes   kv" in receipt
    changes = [change for event in events[1:] for change in event["changes"]]
    assert any(change["change"] == "free" and change["why"] == "preempted" for change in changes)
    admissions = [change for change in changes if change["change"] == "admit"]
    assert any(change["revived"] for change in admissions)
    lengths = {change["seq"]: len(change["token_ids"]) for change in changes if change["change"] == "add"}
    hits = [(change["seq"], len(change["hits"][0]) * events[0]["block_size"]) for change in admissions]
    assert any(num_tokens == lengths[seq] for seq, num_tokens in hits), "a full hit"
    chunks = [chunk for change in changes if change["change"] == "schedule" for chunk in change["chunks"]]
    assert any(chunk["start"] > 0 and not chunk["samples"] for chunk in chunks), "a prompt in chunks"
    browser = open_page(events)
    press(browser, Keys.ARROW_RIGHT * (len(events) - 2))
    assert text_of(browser, "number") == str(len(events) - 1)
    limits = [events[0][name] for name in ("num_blocks", "max_num_batched_tokens")]
    played = browser.execute_script("return replay(...arguments)", *limits)
    assert [step["changes"] for step in played[1:]] == [step["changes"] for step in events[1:]]


def what_happens(event: dict) -> set[str]:
    """Return the events of a step to which lessons link."""
    found = set()
    for change in event["changes"]:
        if change["change"] == "admit":
            found |= {"hit"} if change["hits"][0] else set()
            found |= {"revived"} if change["revived"] else set()
        if change["change"] == "free" and change["why"] == "preempted":
            found.add("preempted")
        if change["change"] == "schedule" and not all(chunk["samples"] for chunk in change["chunks"]):
            found.add("a part of a prompt")
    return found


SUBJECTS = {"05-prefix-caching": "hit", "06-eviction": "revived", "09-preemption": "preempted"}
SUBJECTS |= {"08-chunked-prompts": "a part of a prompt", "one-evening": "preempted"}


@pytest.mark.parametrize(("lesson", "expected"), SUBJECTS.items())
def test_the_steps_that_lessons_link_to_show_their_subject(lesson, expected, recorded_page):
    events = events_of(recorded_page.read_text())
    steps = re.findall(r"run\.html#(\d+)", (ROOT / "docs" / f"{lesson}.md").read_text())
    assert steps
    assert expected in what_happens(events[int(steps[0])])
    assert all(what_happens(events[int(step)]) for step in steps)


def open_recorded(browser, page: Path) -> None:
    browser.get("about:blank")
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_tour_shows_each_sentence_together_with_its_blocks(browser, recorded_page, width, scheme):
    with seen_at(browser, width, scheme):
        open_recorded(browser, recorded_page)
        assert probe(browser, "clippedTexts") == []
        assert probe(browser, "offScreen", "#intro, #begin") == []
        browser.find_element(By.ID, "begin").click()
        titles, texts = [], set()
        while browser.find_element(By.ID, "tour").is_displayed():
            titles.append(text_of(browser, "tour-title"))
            texts.add(text_of(browser, "tour-text"))
            assert probe(browser, "offScreen", "#tour, #tour-next, .spoken") == [], titles[-1]
            assert probe(browser, "clippedTexts") == [], titles[-1]
            assert browser.find_elements(By.CSS_SELECTOR, ".spoken") or titles[-1] == "The end"
            lesson = browser.find_element(By.CSS_SELECTOR, "#tour-lesson a").get_attribute("href")
            assert (ROOT / "docs" / lesson.rsplit("/", 1)[1]).exists()
            browser.find_element(By.ID, "tour-next").click()
        assert len(texts) == len(titles) == 10
        assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_each_step_shows_its_text_together_with_the_blocks(browser, recorded_page, width):
    with seen_at(browser, width):
        open_recorded(browser, recorded_page)
        browser.find_element(By.ID, "close-intro").click()
        for step in range(browser.execute_script("return last")):
            browser.execute_script("show(arguments[0]); pinned = 1; drawDetail(1)", step)
            assert probe(browser, "clippedTexts") == [], step + 1
            assert probe(browser, "offScreen", "#pool, #pool [data-did], #headline") == [], step + 1
