"""Unmodified tools of other projects: their programs against the server, and lm-eval on the engine itself.

They are installed in an environment of their own, which also finds this one's packages, such as PyTorch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import DEMO
from tests.serving import Script, scripted

ROOT = DEMO.parent.parent
LISTED, AGENTS = (ROOT / "tests" / f"outside_{name}.txt" for name in ("tools", "agents"))
GUIDE = ROOT / "docs" / "guide" / "tools.md"
QUESTION = "What is 27 + 58?"
START = """
import json, sys, pydantic
url, question = sys.argv[1:]
messages = [{"role": "user", "content": question}]
class Sum(pydantic.BaseModel):
    "Two numbers."
    model_config = {"extra": "forbid"}
    a: int = pydantic.Field(ge=0, le=99)
    b: int = pydantic.Field(ge=0, le=99)
def check(*answers):
    assert answers == ("27 + 58 = 85",) * len(answers), answers
def check_number(number):
    assert number in range(100), number
"""


@pytest.fixture(scope="module")
def python(request, tmp_path_factory) -> Path:
    """Return the interpreter of an environment with the tools, made once for all of pytest's processes."""
    listed: Path = getattr(request, "param", LISTED)
    where: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        where = where.parent
    path: Path = where / listed.stem
    done = where / f"{listed.stem}.log"
    with FileLock(where / f"{listed.stem}.lock"):
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
            (site,) = path.glob("lib/python*/site-packages")
            (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
            command = [str(path / "bin" / "python"), "-m", "pip", "install", "--no-compile"]
            for wanted in ["pip>=26"], ["-r", str(listed)]:  # this pip resolves the list in half the time
                made = subprocess.run([*command, *wanted], capture_output=True, text=True)
            done.write_text(made.stderr if made.returncode else "")
    if "(from versions: none)" in done.read_text():  # as pip says where it reaches no index
        pytest.skip(f"needs PyPI: {done.read_text()[-300:]}")
    assert not done.read_text()
    return path / "bin" / "python"


@pytest.fixture
def run(python, tmp_path):
    """Return a function that runs a command with the tools' interpreter and returns its stdout."""

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it is fetched from elsewhere else
        environment["PYTHONDONTWRITEBYTECODE"] = ""  # nothing is compiled at each import again
        command = [python, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    return run


def test_the_guide_names_the_tested_versions():
    text = LISTED.read_text() + AGENTS.read_text()
    pins = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", text, re.MULTILINE)
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", GUIDE.read_text(), re.MULTILINE)
    assert pins == rows


CLIENTS: dict[str, str] = {
    "openai, an older one": """
import openai
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
asked = {"model": "demo", "messages": messages, "temperature": 0}
pieces = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
assert (openai.__version__, [model.id for model in client.models.list()]) == ("2.54.0", ["demo"])
check(client.chat.completions.create(**asked).choices[0].message.content)
check("".join(piece.choices[0].delta.content for piece in pieces if piece.choices))
check(client.responses.create(model="demo", input=question, temperature=0).output_text)
check_number(client.chat.completions.parse(**asked, response_format=Sum).choices[0].message.parsed.a)
""",
    "langchain": """
from langchain_openai import ChatOpenAI, OpenAI
asked = {"model": "demo", "base_url": url, "api_key": "none", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**asked)
check(chat.invoke(question).content, *(answer.content for answer in chat.batch([question, question])))
check("".join(piece.content for piece in chat.stream(question)))
check(ChatOpenAI(**asked, use_responses_api=True).invoke(question).text)
for method in "json_schema", "function_calling":
    check_number(chat.with_structured_output(Sum, method=method).invoke(question).a)
assert isinstance(OpenAI(**asked, max_tokens=5).invoke("2 3 5"), str)
assert chat.bind_tools([Sum], tool_choice="any").invoke(question).tool_calls[0]["name"] == "Sum"
try:
    chat.invoke("a b c d " * 2000)
except Exception as error:
    names = {kind.__name__ for kind in type(error).__mro__}
assert {"ContextOverflowError", "BadRequestError"} <= names
""",
    "llama-index": """
import asyncio
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
asked = {"model": "demo", "api_base": url, "api_key": "none", "temperature": 0, "context_window": 512}
llm = OpenAILike(**asked, is_chat_model=True)
chat = [ChatMessage(role="user", content=question)]
check(llm.chat(chat).message.content, asyncio.run(llm.achat(chat)).message.content)
check(llm.complete(question).text)
check("".join(piece.delta for piece in llm.stream_chat(chat)))
calls = {"is_function_calling_model": True, "should_use_structured_outputs": True}
check_number(OpenAILike(**asked, is_chat_model=True, **calls).as_structured_llm(Sum).chat(chat).raw.a)
assert isinstance(OpenAILike(**asked, max_tokens=5).complete("2 3 5").text, str)
""",
    "litellm": """
import litellm
to = {"api_base": url, "api_key": "none", "temperature": 0, "max_retries": 0}
asked = {**to, "messages": messages}
pieces = litellm.completion("hosted_vllm/demo", **asked, stream=True, stream_options={"include_usage": True})
for api in "openai", "hosted_vllm":
    check(litellm.completion(f"{api}/demo", **asked).choices[0].message.content)
check("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
made = litellm.text_completion("2 3 5", "text-completion-openai/demo", **to, max_tokens=5)
assert isinstance(made.choices[0].text, str)
try:
    litellm.completion("hosted_vllm/demo", **to, messages=[{"role": "user", "content": "a b c d " * 2000}])
    raise SystemExit("it is not too long")
except litellm.ContextWindowExceededError:
    pass
""",
    "instructor": """
import instructor, openai
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    asked = {"messages": messages, "response_model": Sum, "temperature": 0, "max_retries": 0}
    check_number(client.create(model="demo", **asked).a)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_other_clients_get_answers_and_errors_in_their_own_types(client, run, url):
    run("-c", START + CLIENTS[client], f"{url}/v1", QUESTION)


CALL = '<think>I look.</think><tool_call>\n{"name": "degrees_in", "arguments": {"city": "Paris", "now": "yes"'
REPORT = '{"city": "Paris", "degrees": 12}'
FINAL = f'<tool_call>\n{{"name": "final_result", "arguments": {REPORT}}}\n</tool_call>'
DEGREES = """
class Report(pydantic.BaseModel):
    city: str
    degrees: int

report, called = {"city": "Paris", "degrees": 12}, []
def degrees_in(city: str, now: bool) -> str:
    "Tell how warm it is."
    called.append([city, type(now).__name__])
    return "It has 12 degrees"
"""


@pytest.fixture
def thinking_url(tmp_path):
    """Yield the address of a server whose model calls a tool with a wrong argument, and then reports."""
    script = Script()
    script.says = {"12 degrees": REPORT, QUESTION: CALL, "Report": FINAL}
    with scripted(script, tmp_path / "model", layers=4) as (url, _):
        yield url


AGENTS_SDK = """
import agents, asyncio, json, openai
agents.set_tracing_disabled(True)
def agent(**settings):  # with a client of its own: a client belongs to one event loop
    model = getattr(agents, MODEL)("demo", openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    settings |= {"model_settings": agents.ModelSettings(temperature=0, max_tokens=200)}
    return agents.Agent("Warm", model=model, tools=[agents.function_tool(degrees_in)], **settings)

async def stream():
    run = agents.Runner.run_streamed(agent(), question)
    kinds = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
    assert json.loads(run.final_output) == report
    items = ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert [kind for kind in kinds if kind != "reasoning_item"] == items

assert agents.Runner.run_sync(agent(output_type=Report), question).final_output.model_dump() == report
asyncio.run(stream())
"""
PYDANTIC_AI = """
import json
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import openai
from pydantic_ai.providers.openai import OpenAIProvider
model = getattr(openai, MODEL)("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
def answer(question, **settings):
    agent = Agent(model, tools=[degrees_in], model_settings={"temperature": 0, "max_tokens": 200}, **settings)
    return agent.run_sync(question).output
assert answer(question, output_type=NativeOutput(Report)).model_dump() == report
assert json.loads(answer(question)) == report
assert answer("Report.", output_type=Report).model_dump() == report
"""


@pytest.mark.slow
@pytest.mark.parametrize("python", [AGENTS], indirect=True, ids=[""])
def test_agents_with_tools_and_an_output_type(run, thinking_url):
    """The tools are strict, so that the wrong argument cannot be sampled."""
    programs = [(AGENTS_SDK, f"OpenAI{api}Model") for api in ("Responses", "ChatCompletions")]
    programs += [(PYDANTIC_AI, f"OpenAI{api}Model") for api in ("Chat", "Responses")]
    check = "assert called == [['Paris', 'bool']] * 2\n"
    code = "".join(DEGREES + program.replace("MODEL", repr(model)) + check for program, model in programs)
    run("-c", START + code, f"{thinking_url}/v1", QUESTION)


@pytest.mark.slow
def test_anthropic(run, tmp_path):
    """The answers are a script's: the bundled model knows neither thoughts nor tools."""
    program = r"""
import anthropic, re
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="sesame", max_retries=0)
wrong_key, long = {"Authorization": "Bearer open"}, [{"role": "user", "content": "a b c d " * 2000}]
schema = Sum.model_json_schema()
kept = {"type": "ephemeral"}
asked = {
    "model": "demo",
    "max_tokens": 300,
    "messages": messages,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": kept}],
    "tools": [{"name": "add", "description": "Add.", "input_schema": schema, "cache_control": kept}],
}
first = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
with client.messages.stream(**asked, thinking={"type": "adaptive"}) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_message()
assert {"input_json", "signature", "text", "thinking", "message_stop", "content_block_stop"} <= kinds
for thought, text, use in final.content, first.content:
    assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert (thought.thinking, text.text, use.input) == ("A sum.", "I add.", {"a": 27, "b": 58})
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "85"}]}
asked["messages"] = [*messages, first.to_param(), {"role": "user", "content": [result]}]
last = client.messages.create(**asked, thinking={"type": "disabled"})
raw = client.messages.create(**asked, stream=True, stop_sequences=["8", "x"])
(end,) = (event.delta for event in raw if event.type == "message_delta")
assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "8")
count = client.messages.count_tokens(**{name: asked[name] for name in asked if name != "max_tokens"})
assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
settings = {"ignore_eos": True, "top_k": 1, "temperature": 0, "seed": 1}
extra = client.messages.create(**asked | {"max_tokens": 50}, extra_body=settings)
assert extra.usage.output_tokens == 50
edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
beta = client.beta.messages.create(**asked, betas=["context-management-2025-06-27"], context_management=edits)
assert last.content[0].text == beta.content[0].text == "It is 85."
numbers = [{"role": "user", "content": "Two numbers"}]
parsed = client.messages.parse(model="demo", max_tokens=300, messages=numbers, output_format=Sum)
check_number(parsed.parsed_output.a)
called = client.messages.create(**{**asked, "messages": numbers}, tool_choice={"type": "any"})
assert called.content[0].name == "add"
assert (anthropic.__version__, [model.id for model in client.models.list()]) == ("2.14.0", ["demo"])
for error, kind, change in (
    (anthropic.NotFoundError, "not_found_error", {"model": "claude"}),
    (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"top_kk": 1}}),
    (anthropic.BadRequestError, "invalid_request_error", {"messages": long}),
    (anthropic.AuthenticationError, "authentication_error", {"extra_headers": wrong_key}),
):
    try:
        client.messages.create(**asked | change)
        raise SystemExit(f"{change} is accepted")
    except error as refused:
        found = refused.body["error"]
        assert found["type"] == kind
        is_long = re.fullmatch(r"prompt is too long: \d{5} tokens > 1023 maximum", found["message"])
        assert bool(is_long) == ("messages" in change)
"""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call>'
    script = Script()
    script.says = {"<|tool|>85": "It is 85.", QUESTION: f"A sum.</think>I add.{call}"}
    with scripted(script, tmp_path / "model", layers=4, api_key="sesame") as (url, _):
        run("-c", START + program, f"{url}/v1", QUESTION)


GUIDELLM = """
import sys
from guidellm.cli import cli
for path in "completions", "chat/completions", "responses":
    backend = f"kind=openai_http,target={sys.argv[1]},model=demo,request_format=/v1/{path}"
    output = f"kind=json,path={path[:4]}.json"
    cli(["run", "--backend", backend, "--output", output, *sys.argv[2:]], standalone_mode=False)
"""


@pytest.mark.slow
def test_guidellm(run, url, tmp_path, monkeypatch):
    monkeypatch.setenv("GUIDELLM__MAX_WORKER_PROCESSES", "1")  # each imports PyTorch
    run(
        *("-c", GUIDELLM, url, "--disable-console"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO}", "--profile", "kind=concurrent,streams=2"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
        *("--constraint", "kind=max_requests,count=6"),
    )
    for name in "comp", "chat", "resp":
        (measured,) = json.loads((tmp_path / f"{name}.json").read_text())["benchmarks"]
        requests = measured["requests"]
        assert (len(requests["successful"]), len(requests["errored"])) == (6, 0)
        assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}


LM_EVAL = """
import sys
import lm_eval
from lm_eval.tasks import TaskManager
url, model = sys.argv[1:]

manager = TaskManager(include_path=".", include_defaults=False)  # which are thousands

def evaluate(way, path, tasks, more=""):
    settings = f"model=demo,num_concurrent=4,base_url={url}/v1/{path}{more}"
    made = lm_eval.simple_evaluate(way, settings, tasks, task_manager=manager, apply_chat_template=True)
    names = {"chosen": "acc,none", "generated": "exact_match,none"}
    scores = [made["results"][task][names[task]] for task in tasks]
    assert all(0 < score < 1 for score in scores), scores
    return scores[-1], [sample["filtered_resps"] for sample in made["samples"]["generated"]]

completions = f",tokenizer={model},max_length=512"
found = evaluate("local-completions", "completions", ["chosen", "generated"], completions)
assert found == evaluate("local-chat-completions", "chat/completions", ["generated"])
"""


@pytest.mark.slow
def test_lm_eval_gets_the_same_scores_in_both_ways(run, url, tmp_path):
    shutil.copytree(Path(__file__).with_name("lm_eval"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "evaluate.py").write_text(LM_EVAL)
    run("evaluate.py", url, DEMO)
