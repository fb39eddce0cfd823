"""The lessons and the guide in docs/, and README: code prints what they say, what they point at exists."""

import doctest
import importlib.util
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from transformers import AutoModelForCausalLM

import docs
from docs import settings
from docs.beam_search import beam_search
from docs.figures import PICTURES
from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.flags import describe
from tests.helpers import DEMO, chain_checkpoint, check_greedy
from tests.launches import obstacle
from tests.test_structure import PACKAGE, imports_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LESSONS = sorted(DOCS.glob("[0-9]*.md"))
KERNEL, READABLE_GPU = DOCS / "11-a-kernel.md", DOCS / "21-a-gpu-you-can-read.md"  # need Triton
REGIONS = DOCS / "guide" / "regions.md"  # the page of the guide whose code is run
GUIDE = sorted((DOCS / "guide").glob("*.md"))
pytestmark = pytest.mark.usefixtures("at_the_root")
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
ARTICLE = DOCS / "one-evening.md"
BUILT = DOCS / "run.html", DOCS / "live.html"  # by commands that docs/README.md names
COURSE = [DOCS / "README.md", DOCS / "glossary.md", DOCS / "bugs.md", ARTICLE, *LESSONS]
PAGES = [*READMES, *COURSE, *GUIDE, ROOT / "benchmarks" / "gpu.md"]
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def run(page: Path) -> None:
    """Run a page's Python as one session; AssertionError where it prints something else."""
    for example in Sybil([PythonCodeBlockParser()]).parse(page).examples():
        example.evaluate()


RUN = [path for path in (*LESSONS, REGIONS) if path not in (KERNEL, READABLE_GPU)]
SLOW = "03-rows-and-bytes", "15-load-and-policies", "20-travelling-blocks"  # measure, or simulate loads


@pytest.mark.parametrize(
    "lesson", [pytest.param(x, id=x.stem, marks=[pytest.mark.slow] * (x.stem in SLOW)) for x in RUN]
)
def test_a_lesson_prints_what_it_says(lesson):
    run(lesson)


MODULES = [path for name in ("nanoengine", "benchmarks") for path in (ROOT / name).rglob("*.py")]


@pytest.mark.parametrize("path", sorted(str(x.relative_to(ROOT)) for x in MODULES if ">>> " in x.read_text()))
def test_the_examples_of_docstrings_print_what_they_say(path):
    assert doctest.testmod(importlib.import_module(path[:-3].replace("/", "."))).failed == 0


def test_the_article_prints_what_it_says_and_says_what_was_measured():
    run(ARTICLE)
    prose = re.sub(r"```.*?```|\(https[^)]*\)", "", ARTICLE.read_text(), flags=re.DOTALL)
    measured = "".join((DOCS / "guide" / name).read_text() for name in ("performance.md", "lab.md"))
    assert [figure for figure in re.findall(r"\d+\.\d+", prose) if figure not in measured] == []


def test_the_page_of_a_run_links_to_lessons_by_their_numbers():
    words = json.loads((PACKAGE / "viewer" / "page" / "words.json").read_text())
    for number, (name, _) in words["lessons"].items():
        assert (DOCS / f"{name}.md").read_text().startswith(f"# {number}. ")


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_the_lesson_on_ptx_prints_what_it_says():
    run(READABLE_GPU)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_lesson_on_kernels_prints_what_it_says_under_tritons_interpreter():
    command = [sys.executable, "-c", "from tests.test_docs import KERNEL, run; run(KERNEL)"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_kernel_is_the_code_of_its_lesson():
    shown = re.findall(r"```py\n(.*?)```", KERNEL.read_text(), re.DOTALL)
    assert "@triton.jit" in shown[0]
    assert shown[0] in (DOCS / "kernel.py").read_text()


def test_the_engine_of_the_first_three_lessons_has_less_than_a_hundred_lines():
    text = "".join(lesson.read_text() for lesson in LESSONS[:4])
    taught = re.findall(r"^```python\n(?!>>>)(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert 80 < len([line for block in taught for line in block.splitlines() if line]) < 100


def test_the_engine_of_lessons_1_2_and_4_gives_the_tokens_of_transformers():
    taught = SimpleNamespace(**docs.lesson(1, 2, 4))
    ask, generate, generate_cached = taught.ask, taught.generate, taught.generate_cached
    questions = "What is 62 + 19?|Count from 3 to 11.|Spell the word paging backwards."
    prompts = [ask(question) for question in questions.split("|")]
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    expected = [generate(prompt) for prompt in prompts]
    check_greedy(model, prompts, 60, expected)
    assert all(answer[-1] == taught.STOP for answer in expected)
    assert [generate_cached(prompt) for prompt in prompts] == expected
    for block_size in 1, 16:
        assert taught.Engine(256 // block_size, block_size).generate(prompts) == expected


def check_beam_search(llm, model, prompt, num_beams, ends):
    beams = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
    ids = torch.tensor([prompt])
    beams |= {"max_new_tokens": 12, "eos_token_id": ends, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **beams)[:, len(prompt) :].tolist()
    outputs = beam_search(llm, prompt, num_beams, 12)
    for output, row in zip(outputs, expected, strict=True):
        assert output + [row[-1]] * (len(row) - len(output)) == row  # with what fills it up


@pytest.mark.parametrize("num_beams", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_beam_search_equals_transformers_with_any_number_of_end_tokens(num_beams, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32")
    with LLM(DEMO, dtype="float32", num_kv_blocks=64, block_size=8, max_logprobs=24) as llm:
        checkpoint = llm.llm_engine.checkpoint
        chat = [{"role": "user", "content": "Spell the word paging backwards."}]
        prompt = llm.render_chat([chat])[0]["prompt_token_ids"]
        check_beam_search(llm, model, prompt, num_beams, list(checkpoint.eos_token_ids))
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        (likely,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs
        for ends in [*likely], [*likely][1:4], []:  # the first would end every beam at once
            with monkeypatch.context() as patch:
                patch.setattr(llm.llm_engine, "checkpoint", replace(checkpoint, eos_token_ids=(*ends,)))
                check_beam_search(llm, model, prompt, num_beams, ends or None)


def test_beam_search_that_needs_more_logprobs_than_allowed_names_the_limit_before_the_first_step():
    with LLM(DEMO, num_kv_blocks=8, max_logprobs=15) as llm:
        assert len(llm.llm_engine.checkpoint.eos_token_ids) == 2
        assert len(beam_search(llm, [1], 5, 2)) == 5
        num_steps = llm.metrics()["num_steps"]
        with pytest.raises(ValueError, match=r"18, .* allowed: 15; raise max_logprobs"):
            beam_search(llm, [1], 6, 2)
        assert llm.metrics()["num_steps"] == num_steps


def test_beam_search_with_more_candidates_than_tokens_takes_them_all(tmp_path):
    with LLM(str(chain_checkpoint(tmp_path, "abc")), num_kv_blocks=200, max_logprobs=-1) as llm:
        outputs = beam_search(llm, [97], 130, 2)  # 260 candidates of 257 tokens
        assert outputs[0] == [98, 99]
        assert len({tuple(output) for output in outputs}) == 130


SYMBOL = re.compile(r"\[`([\w.]+)`\]\((?:\.\./)+(nanoengine/[\w/]+)\.py\)")


@by_name
def test_links_of_a_page_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path = target.partition("#")[0]
        place = page.parent / path
        assert target.startswith("https://") or place.exists() or place.resolve() in BUILT, target
    for symbol, module in SYMBOL.findall(text):
        operator.attrgetter(symbol)(importlib.import_module(module.replace("/", ".")))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_has_code_pointers_an_exercise_with_its_answer_and_three_questions(lesson):
    text, questions = lesson.read_text().split("\n</details>\n\n## Three questions\n\n")
    one = r"{}\. [^<]+\? <details><summary>Answer</summary>\s[^<]+ </details>\n"
    assert re.fullmatch("".join(one.format(i) for i in (1, 2, 3)) + r"\n\[.*\n", questions)
    body, exercise = text.split("\n## Exercise\n")
    question, answer = exercise.split("\n<details><summary>Answer</summary>\n")
    assert question.strip()
    assert len(SYMBOL.findall(body.split("\n## In the engine\n")[1])) >= 2
    for part in body, answer:
        assert "```python\n>>> " in part


def test_the_contents_list_every_lesson_in_order_under_its_title():
    text = (DOCS / "README.md").read_text()
    listed = re.findall(r"^\| (\d+) \| \[([^\]]+)\]\(([^)]+)\)", text, re.MULTILINE)
    assert [name for _, _, name in listed] == [lesson.name for lesson in LESSONS]
    for (number, title, _), lesson in zip(listed, LESSONS, strict=True):
        assert lesson.read_text().startswith(f"# {number}. {title}")


def test_each_picture_is_what_the_script_draws():
    for name, draw in PICTURES.items():
        assert (DOCS / name).read_text() == draw().svg(), f"{name}: python -m docs.figures"


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.name)
def test_readme_is_one_page_and_its_first_screen_has_two_commands_a_real_model_and_a_picture(readme):
    lines = readme.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 121
    first_screen = "\n".join(lines[:40])
    for what in ("vLLM", "transformers", "make run", "make test", "--model Qwen/", "\nA: ", "![", "H200"):
        assert what in first_screen
    num_lines = len((PACKAGE / "nano.py").read_text().splitlines())
    assert re.findall(r"\d+(?= lines|\s行)", first_screen) == [str(num_lines)]
    assert "git clone" not in first_screen


@pytest.mark.parametrize(
    ("page", "first", "source"),
    [(READMES[0], "batch +=", "engine.py"), (DOCS / "guide" / "how-it-works.md", "chunks =", "nano.py")],
)
def test_a_page_shows_a_step_as_its_source_does(page, first, source):
    (step,) = re.findall(rf"^```\n({first}.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert textwrap.indent(step, "    ") in (PACKAGE / source).read_text()


def test_the_chinese_readme_has_the_code_the_links_and_the_numbers_of_the_other():
    ours, theirs = (readme.read_text() for readme in READMES)
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(ours) == blocks.findall(theirs)
    for what in r"`[^`\n]+`", r"\d+(?:\.\d+)*", r"\]\(([^)]+)\)", r"^\|.*?\|", r"^#+ ":
        of_ours, of_theirs = (re.findall(what, text, re.MULTILINE) for text in (ours, theirs))
        if what.startswith("^"):  # rows and headings, each in words of its own
            of_ours, of_theirs = ([len(of_each)] for of_each in (of_ours, of_theirs))
        links_to_each_other = {readme.name for readme in READMES}
        assert sorted({*of_ours} - links_to_each_other) == sorted({*of_theirs} - links_to_each_other)


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.name)
def test_the_figures_of_readme_are_on_the_page_that_has_their_commands(readme):
    page = (DOCS / "guide" / "performance.md").read_text()
    rows = re.findall(r"^\| (\w+).*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", readme.read_text(), re.MULTILINE)
    assert len(rows) == 5
    for workload, *figures in rows:
        pattern = rf"^\| {workload} " + "".join(rf"\| {re.escape(figure)}[ (].*?" for figure in figures)
        assert re.search(pattern, page, re.MULTILINE), (workload, figures)


def test_the_guide_lists_every_page_of_it():
    page = (DOCS / "guide" / "README.md").read_text()
    listed = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", page, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in GUIDE if page.name != "README.md")


def test_the_guide_s_page_of_settings_is_as_generated_and_has_a_line_about_each():
    assert settings.PAGE.read_text() == settings.page()
    for config in (EngineConfig, SamplingParams):
        texts = describe(config)
        assert all(texts[item.name] for item in fields(config) if item.init)


def test_the_guide_s_list_of_files_is_whole_and_each_row_needs_only_rows_below_it():
    page = (DOCS / "guide" / "files.md").read_text().split("## Extending it")[0]
    floor_of: dict[str, int] = {}
    for floor, (where, what) in enumerate(re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.MULTILINE)):
        places = re.findall(r"`([\w/.]+)`", where)
        for place in places:
            inside = re.findall(r"`(\w+\.py)`", what) if place.endswith("/") else [""]
            floor_of |= {place + file: floor for file in inside}
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    listed = {file for file in files if not file.endswith("__init__.py") and "demo/" not in file}
    assert floor_of.keys() == listed
    for file, floor in floor_of.items():
        for name in imports_of(PACKAGE / file, "nanoengine"):
            assert floor_of[name.replace(".", "/") + ".py"] >= floor, f"{file} imports {name}"


@pytest.mark.slow
def test_the_site_is_made_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    site = tmp_path / "site"
    for arguments in ["run", "--trace", "docs/run.html"], ["trace", "-o", "docs/live.html"]:
        page = [sys.executable, "-m", "nanoengine", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(page, capture_output=True, check=True, cwd=tmp_path, env=environment)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    made = subprocess.run(build, capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in [ARTICLE, *LESSONS, *GUIDE]}
    names = {str(page).replace("README", "index") for page in pages}
    for name in names | {"index.html", "run.html", "live.html"}:
        text = (site / name).read_text()
        assert "```" not in text, "code that was not set as code"
        for target in re.findall(r'(?:href|src)="([^"#]+)', text):
            if not target.startswith(("https://", "data:", "/", "?")):
                assert (site / name).parent.joinpath(target).exists(), f"{name}: {target}"
    assert 'lessons = ".html"' in (site / "run.html").read_text()
    text = (site / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?://[^"]*)', text)
    assert [host for host in loaded if "github.io" not in host] == [], "it needs no other host"
