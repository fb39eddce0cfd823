"""The bundled model answers correctly; test_nano.py compares its tokens with those of transformers."""

import json
import random
import signal
import sys
from unittest.mock import Mock

import pytest

from examples import train_demo as train
from nanoengine import LLM, SamplingParams
from nanoengine.cli import chat, run
from tests.helpers import DEMO, THINKING_TEMPLATE, thinking_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=250)
TASKS = {name: getattr(train, f"ask_{name}") for name in ("sum", "count", "backwards", "primes")}
TASKS["passage"] = lambda rng: train.ask_passage(rng, 20)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(DEMO), num_kv_blocks=200) as llm:
        yield llm


def test_answers_are_right_in_8_bits():
    """Mistakes would show as wrong text: 48 of 50 new questions must be right."""
    rng = random.Random(999)
    asked = [ask(rng) for ask in TASKS.values() for _ in range(10)]
    with LLM(str(DEMO), num_kv_blocks=400, quantization="int8", activations="int8") as llm:
        chats = [[{"role": "user", "content": question}] for question, _ in asked]
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    right = [out.outputs[0].text == answer for out, (_, answer) in zip(outputs, asked, strict=True)]
    assert sum(right) >= 48


def test_run_answers_its_questions(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run.main([])
    printed = capsys.readouterr().out
    for answer in ("27 + 58 = 85", "8 9 10 11", "noitnetta", train.PRIMES, "under a tower.", "tokens/s"):
        assert answer in printed


def test_chat_streams_answers_remembers_turns_and_survives_ctrl_c(llm, monkeypatch, capsys):
    passage = "The old fox found the red apple near a castle."
    asked = iter([f"Remember this passage: {passage}", "What is 3 + 4?", "again", "Repeat the passage."])

    def answer(prompt):
        question = next(asked, "")
        if question == "again":  # Ctrl-C in the middle of this answer
            stream = llm.stream

            def interrupted(*arguments):
                monkeypatch.setattr(llm, "stream", stream)
                yield next(stream(*arguments))
                raise KeyboardInterrupt

            monkeypatch.setattr(llm, "stream", interrupted)
        return question

    monkeypatch.setattr("builtins.input", answer)
    chat.converse(llm, GREEDY)
    monkeypatch.setattr("builtins.input", Mock(side_effect=KeyboardInterrupt))  # Ctrl-C at the prompt
    with pytest.raises(KeyboardInterrupt):
        chat.converse(llm, GREEDY)
    assert not llm.has_unfinished_requests()
    shown = capsys.readouterr().out
    assert "3 + 4 = 7" in shown
    assert "[stopped]" in shown
    assert passage in shown


def test_chat_dims_thoughts_forgets_them_and_says_where_an_answer_was_cut(tmp_path, monkeypatch, capsys):
    seen = []
    asked = iter(["ao", "bo", "a" * 999, "co"])
    monkeypatch.setattr("builtins.input", lambda _: next(asked, ""))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with LLM(str(thinking_checkpoint(tmp_path)), num_kv_blocks=20) as llm:
        llm.get_tokenizer().chat_template = THINKING_TEMPLATE
        render = llm.render_chat
        monkeypatch.setattr(llm, "render_chat", lambda given: (seen.append([*given]), render(given))[1])
        chat.converse(llm, SamplingParams(temperature=0, max_tokens=6), "Be brief.", verbose=True)
    shown = capsys.readouterr().out.replace("\033[22m\033[2m", "")
    assert shown.count("\n\033[2mhm\033[22m\n\nSo [cut at 6 tokens]\n\033[2m6 tokens in ") == 3
    first = [("system", "Be brief."), ("user", "ao"), ("assistant", "So"), ("user", "bo")]
    conversations = [[(one["role"], one["content"]) for one in given] for given in seen]
    assert conversations[1] == first
    assert conversations[3] == [("system", "Be brief."), ("user", "co")]  # the one before was too long


def test_checkpoint_is_small_and_made_by_the_training_script():
    assert sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file()) < 8_000_000
    accuracy = json.loads((DEMO / "accuracy.json").read_text())
    assert set(TASKS) < set(accuracy)
    made = json.loads(train.build_tokenizer().backend_tokenizer.to_str())
    assert made["model"] == json.loads((DEMO / "tokenizer.json").read_text())["model"]


@pytest.mark.parametrize(
    ("command", "arguments", "limit"),
    [
        (chat.main, [], 1),
        (chat.main, ["--max-num-seqs", "7"], 7),
        (run.main, ["--prompt", "one"], 1),
        (run.main, ["--prompt", "one", "--prompt", "two"], 2),
    ],
)
def test_run_and_chat_size_the_engine_for_what_they_ask(command, arguments, limit, monkeypatch, capsys):
    def engine(self, **settings):
        raise ValueError(f"max_num_seqs is {settings['max_num_seqs']}")

    monkeypatch.setattr(LLM, "__init__", engine)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        command(arguments)
    assert f"max_num_seqs is {limit}" in capsys.readouterr().err
