"""Checks the functions of nano.py that you write along with the lessons, one lesson at a time.

    python -m docs.check --stub > my_nano.py                    write the file that you fill in
    python -m docs.check 6 my_nano.py                           check your functions of lesson 6
    python -m docs.check all my_nano.py                         check the answers of the whole engine
    python -m docs.check --stub exercises > my_exercises.py     the same for lessons 10, 14, 16 and 18
    python -m docs.check 10 my_exercises.py

The check of a lesson runs your functions from that lesson, and those of nanoengine/nano.py or
docs/exercises.py from all others. So you can do the lessons in any order, and a mistake in one does not fail
another.
"""

import argparse
import ast
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

import docs.checks.blocks
import docs.checks.model
import docs.checks.parts
import docs.checks.scheduling
import docs.exercises
from docs.checks import CHECKS

ROOT = Path(__file__).parent.parent
SOLUTIONS = {"nano": ROOT / "nanoengine" / "nano.py", "exercises": ROOT / "docs" / "exercises.py"}
LESSONS = {
    "1": "The model: norm, rotate, __call__",
    "2": "The KV cache: attention",
    "4": "Paging: num_blocks_for, may_append, map_slots, gathered_attention",
    "5": "Prefix caching: hash_full_blocks, _find, find_prefix, register_full_blocks, allocate",
    "6": "Eviction: _take_free_block, free",
    "7": "Continuous batching: schedule, update",
    "8": "Chunked prefill: _schedule_chunk",
    "9": "Preemption: _make_room",
    "10": "Paged attention: merge, attend_blocks",
    "12": "CUDA graphs: pad_decodes, compute",
    "13": "Sampling: uniform, keep_probable, sample",
    "14": "Speculative decoding: draft, update, lookup, accept, verify",
    "16": "Quantization: quantize, pack, unpack, multiply",
    "18": "Sliding windows: num_skipped_blocks, window_hit",
    "all": "The whole engine, on the bundled model",
}
IN_EXERCISES = ("10", "14", "16", "18")  # the lessons whose functions are in docs/exercises.py
EMPTY = "raise NotImplementedError"  # the body of a function in the stub
STARTS = {  # the stub's first versions of what an earlier lesson calls already
    "attention": "parts = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))\n"
    "out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)  # without a cache\n"
    "return out.squeeze(0).transpose(0, 1)",
    "gathered_attention": "length, key_len = len(q), inputs.key_lens[0]  # of one sequence, in one block\n"
    "k, v = (x[inputs.block_tables[0, 0], :key_len] for x in cache)\n"
    "is_seen = torch.ones(length, key_len, dtype=torch.bool).tril(key_len - length)\n"
    "parts = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))\n"
    "out = F.scaled_dot_product_attention(*parts, is_seen, enable_gqa=True)\n"
    "return out.squeeze(0).transpose(0, 1)",
    "_take_free_block": "block = self.empty_blocks.popleft()\nblock.ref_count = 1\nreturn block.block_id",
    "_schedule_chunk": "start, seq.num_computed_tokens = seq.num_computed_tokens, len(seq.token_ids)\n"
    "self.block_manager.register_full_blocks(seq)\n"
    "return Chunk(seq, start, len(seq.token_ids), samples=True)",
    "_make_room": "return self.block_manager.may_append(seq, len(seq.token_ids))",
    "compute": "return self.model(send(inputs, self.model.device), self.caches)",
    "uniform": "return 0.5",
    "sample": "return logits.argmax(-1)",
}
SECONDS = {"all": 300.0}  # processor time of one check; all others get 2 seconds

# ---- the student's file --------------------------------------------------------------------------


def sheet_of(lesson: str) -> str:
    """Return which of the two files has the functions of a lesson."""
    return "exercises" if lesson in IN_EXERCISES else "nano"


@cache
def functions_of(source: str, sheet: str) -> list[tuple[str, str, ast.FunctionDef]]:
    """Return (lesson, class or "", function) for each function that a lesson leaves to the student."""
    lessons = [lesson for lesson in LESSONS if lesson != "all" and sheet_of(lesson) == sheet]
    lesson_of = {
        name: lesson for lesson in lessons for name in LESSONS[lesson].partition(": ")[2].split(", ")
    }
    found = []
    for node in ast.parse(source).body:
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and item.name in lesson_of:
                found.append((lesson_of[item.name], owner, item))
    return found


@cache
def compiled(source: str, name: str) -> CodeType:
    """Compile source, once for each text."""
    return compile(source, name, "exec")


def stub(sheet: str = "nano", last: int = 0) -> str:
    """Return a solution without the functions that the lessons after `last` leave to the student."""
    lines = SOLUTIONS[sheet].read_text().splitlines()
    for lesson, _, function in reversed(functions_of(SOLUTIONS[sheet].read_text(), sheet)):
        if int(lesson) > last:
            docstring, end = function.body[0], function.body[-1]
            indent = " " * docstring.col_offset
            body = STARTS.get(function.name, EMPTY).splitlines()
            what = f"Enough for the lessons before {lesson}. Replace these lines there."
            body.insert(
                0, f"# {what}" if function.name in STARTS else f"# Lesson {lesson} asks for these lines."
            )
            lines[docstring.end_lineno : end.end_lineno] = [indent + line for line in body]
    return "\n".join(lines) + "\n"


def load(source: str, name: str) -> Any:
    """Return a new module that runs source."""
    module = ModuleType(name)
    module.__dict__["__file__"] = name
    exec(compiled(source, name), module.__dict__)
    return module


@cache
def unwritten(source: str, sheet: str) -> set[str]:
    """Return the names of the functions that are still as in the stub."""
    return {
        item.name
        for _, _, item in functions_of(source, sheet)
        if ast.dump(ast.Module(item.body[1:], [])) == ast.dump(ast.parse(STARTS.get(item.name, EMPTY)))
    }


def not_written(name: str) -> Callable[..., Any]:
    """Return a function that says that it is not written yet."""

    def function(*_: object, **__: object) -> None:
        raise NotImplementedError(name)

    return function


def combine(source: str, lesson: str, name: str = "my_nano.py", alone: bool = False) -> Any:
    """Return the student's module with the solution's functions for all lessons but one.

    For "all", only those that the student has not written are the solution's, and `unwritten` lists them.
    With `alone`, no function of the solution takes part.

    Raises:
        AttributeError: a class or a function of the lesson is missing.
    """
    mine = load(source, name)
    if alone:
        return mine
    sheet, mine.unwritten = sheet_of(lesson), list[str]()
    text = SOLUTIONS[sheet].read_text()
    solution = load(text, str(SOLUTIONS[sheet]))
    for where, owner, function in functions_of(text, sheet):
        ours, theirs = (getattr(module, owner) if owner else module for module in (mine, solution))
        is_written = function.name not in unwritten(source, sheet)
        if lesson == "all" and not is_written:
            mine.unwritten.append(function.name)
        if (lesson == "all" and not is_written) or lesson not in ("all", where):
            setattr(ours, function.name, getattr(theirs, function.name))
        elif getattr(ours, function.name, None) is None:
            raise AttributeError(f"{owner}.{function.name}".lstrip(".") + " is missing from your file")
        elif not is_written:
            setattr(ours, function.name, not_written(function.name))
    for _, owner, function in functions_of(text, sheet):
        if not owner:  # the solution's methods call these as module-level functions
            solution.__dict__[function.name] = getattr(mine, function.name)
    return mine


class EndlessError(BaseException):
    """Stops a check that takes too long. It is not an Exception, so that no `except Exception` catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise EndlessError in the code of the with statement once it has used that much processor time."""

    def stop(*_: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)  # and again: Python ignores it in a callback
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def explain(error: BaseException, source: str, name: str, seconds: float) -> str:
    """Return what went wrong, and the student's line at which it did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    if isinstance(error, NotImplementedError):
        return f"`{str(error) or frames[-1].name}` is not written yet."
    if isinstance(error, AssertionError) and not frames:
        return str(error)
    what = f"Your code raised {type(error).__name__}: {error}"
    if isinstance(error, KeyError) and "is empty" in str(error):
        what = "`popitem` found no block. `_take_free_block` raises this if no block is free."
    if isinstance(error, EndlessError):
        what = f"Your code was stopped after {seconds:g} seconds. Does a loop never end?"
    if not frames:
        return f"{what}\n    It happened outside your file, in code that uses what your functions returned."
    line, function = frames[-1].lineno or 1, frames[-1].name
    shown = source.splitlines()[line - 1].strip()
    return f"{what}\n    {Path(name).name}, line {line}, in {function}: {shown}"


def find_failures(
    source: str, lesson: str, name: str = "my_nano.py", alone: bool = False, most: float = 2.0
) -> Iterator[str]:
    """Yield a message for each check of the lesson that the student's source fails.

    With `alone`, no function of the solution takes part. `most` is the processor time of a check in seconds.
    No other check runs after one that was stopped.

    Raises:
        SyntaxError: the source does not compile.
    """
    compiled(source, name)
    seconds = SECONDS.get(lesson, most)
    for sentence, check in CHECKS[lesson]:
        try:
            with limited(seconds):
                check(combine(source, lesson, name, alone))
        except (Exception, EndlessError) as error:
            yield f"{sentence}\n    {explain(error, source, name, seconds)}"
            if isinstance(error, EndlessError):
                break


def fastest(work: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def compare_functions(mine: Any) -> str:
    """Time each of the student's functions of lesson 16 alone, and that of docs/exercises.py."""
    torch.set_num_threads(1)
    weight, x = torch.randn(1024, 1024), torch.randn(16, 1024)
    integers, scales, zeros = docs.exercises.quantize(weight, 32)
    packed = docs.exercises.pack(integers)
    lines = ["A matrix of 1024 x 1024 in groups of 32, 16 rows, one thread (yours, docs/exercises.py's):"]
    for name, given in {
        "quantize": (weight, 32),
        "pack": (integers,),
        "unpack": (packed,),
        "multiply": (x, packed, scales, zeros),
    }.items():
        both = (partial(getattr(module, name), *given) for module in (mine, docs.exercises))
        lines.append(f"  {name:8}" + " ".join(f"{1000 * fastest(work, 5):8.2f} ms" for work in both))
    return "\n".join(lines)


def compare_speed(mine: Any) -> str:
    """Serve the same questions with the student's engine, then nanoengine, and say how fast each is."""
    from nanoengine import LLM, SamplingParams

    demo = ROOT / "nanoengine" / "demo"
    llm = mine.LLM(demo, device="cpu")
    chats = [[{"role": "user", "content": f"Count from {i} to {i + 12}."}] for i in range(8)]
    how = {"add_generation_prompt": True, "return_dict": False}
    prompts = [llm.tokenizer.apply_chat_template(chat, **how) for chat in chats]

    def yours() -> int:
        llm.scheduler = llm.make_scheduler()  # with an empty cache
        answers = llm.generate(prompts, mine.SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        return sum(len(answer["token_ids"]) for answer in answers)

    torch.set_num_threads(1)  # faster for matrices this small
    your_speed = yours() / fastest(yours, 2)  # before nanoengine pins its threads to the same cores
    with LLM(demo, enable_prefix_caching=False) as full:

        def ours() -> int:
            params = SamplingParams(temperature=0, max_tokens=60)
            outputs = full.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        our_speed = ours() / fastest(ours, 2)
    rest = " (with nano.py's functions for those that are not written)" if mine.unwritten else ""
    return (
        f"On one thread, your engine{rest} answers 8 questions at {your_speed:.0f} tokens/s, nanoengine at "
        f"{our_speed:.0f}: {our_speed / your_speed:.1f} times as many."
    )


# ---- the command ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run the command, and return how many checks failed."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.check",
        description=__doc__,
        epilog="lessons:\n" + "\n".join(f"  {lesson:4} {what}" for lesson, what in LESSONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lesson", nargs="?", choices=LESSONS, metavar="lesson")
    parser.add_argument("file", nargs="?", type=Path, help="your file; default: the solution")
    parser.add_argument(
        "--stub", nargs="?", const="nano", choices=SOLUTIONS, help="print the file that you fill in"
    )
    options = parser.parse_args(arguments)
    if options.stub:
        print(stub(options.stub), end="")
        return 0
    if options.lesson is None:
        parser.error("name a lesson to check, or use --stub")
    path = options.file or SOLUTIONS[sheet_of(options.lesson)]
    try:
        found = list(find_failures(path.read_text(), options.lesson, str(path)))
    except SyntaxError as error:
        print(f"{path}, line {error.lineno}: {error.msg}")
        return 1
    for failure in found:
        print(failure)
    print(f"{len(CHECKS[options.lesson]) - len(found)} of {len(CHECKS[options.lesson])} checks pass.")
    if not found and options.lesson in ("2", "4", "7", "9", "all"):
        try:
            with limited(60):
                print(compare_speed(combine(path.read_text(), "all", str(path))))
        except (Exception, EndlessError) as error:  # in a function of another lesson
            print(f"The engine's speed is unknown. {explain(error, path.read_text(), str(path), 60)}")
    if not found and options.lesson == "16":
        print(compare_functions(load(path.read_text(), str(path))))
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
