"""Timeouts at random moments of every way to use an engine: `python -m tests.alarms NUMBER SEED`.

This is a process of its own, because it computes with one pinned thread per core and counts threads. It
prints what differs afterwards, as JSON.
"""

import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import closing

import torch

from nanoengine import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from tests.laws import check_laws

CORES = os.sched_getaffinity(0)
PROMPTS = ["The", "Once upon a", "A longer prompt, which has some more tokens than the others have"]
CHAT = [{"role": "user", "content": "Who are you?"}]
stacks: list[str] = []  # where each alarm came
seen = set[int]()
STUCK_SECONDS = 10.0
differences: list[str] = []


class Timeout(Exception):
    """Stands for the exception of a user's time limit."""


def on_alarm(number, frame):
    stacks.append("".join(traceback.format_stack(frame, limit=6)))
    raise Timeout(len(stacks) - 1)


def note(error, in_asyncio=False):
    """Count an exception that reached the user, or what the interpreter and asyncio show to the user.

    asyncio also shows the CancelledError of a `gather` that a timeout has ended.
    """
    if isinstance(error, Timeout):
        seen.update(error.args)
        if isinstance(error.__context__, Timeout):
            note(error.__context__)
    else:
        check(in_asyncio and isinstance(error, asyncio.CancelledError), repr(error))


def check(is_right, what):
    if not is_right:
        differences.append(what)


def unchanged(token_ids, logits):
    return logits + 0.0


def params(**fields):
    settings = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logits_processors": [unchanged]}
    return SamplingParams(**settings, **fields)


# ---- ways to use an engine: each returns the tokens of each prompt -------------------------------


def generate(llm, **settings):
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params(), **settings)]


def stream(llm):
    answers = [[] for _ in PROMPTS]
    with closing(llm.stream(PROMPTS, params())) as outputs:
        for out in outputs:
            answers[int(out.request_id)] += out.outputs[0].token_ids
    return answers


def chat(llm):
    return [out.outputs[0].token_ids for out in llm.chat([CHAT, CHAT], params(), use_tqdm=False)]


def steps(llm):
    """Go on after a timeout: no output may be lost."""
    delta, outputs, is_added = params(output_kind=RequestOutputKind.DELTA), [], False
    while True:
        try:
            while not is_added:
                for i, prompt in enumerate(PROMPTS):
                    if str(i) not in llm.llm_engine.requests:
                        llm.add_request(str(i), prompt, delta)
                is_added = True
            while llm.has_unfinished_requests():
                outputs.append(llm.step())
            break
        except Timeout as error:
            note(error)
    answers = [[] for _ in PROMPTS]
    for out in (out for taken in outputs for out in taken):
        answers[int(out.request_id)] += out.outputs[0].token_ids
    return answers


def aborted(llm):
    """Leave requests half done, and abort them after a timeout too."""
    ids = [str(i) for i in range(len(PROMPTS))]
    try:
        for i, prompt in zip(ids, PROMPTS, strict=True):
            llm.add_request(i, prompt, params())
        for _ in range(3):
            llm.step()
        return []
    finally:
        try:
            llm.abort_request(ids)
        finally:
            llm.abort_request(ids)


async def consume(engine, prompt, request_id):
    async for out in engine.generate(prompt, params(), request_id):
        token_ids = out.outputs[0].token_ids
    return token_ids


async def all_of(engine, seconds):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: note(context.get("exception"), in_asyncio=True))
    signal.setitimer(signal.ITIMER_REAL, seconds, STUCK_SECONDS)
    try:
        return await asyncio.gather(*(consume(engine, x, str(i)) for i, x in enumerate(PROMPTS)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS)


def run_async(engine, seconds=0.0):
    """Run `all_of`. An alarm in asyncio's own code may lose a callback: it then waits for the next alarm."""
    try:
        return asyncio.run(all_of(engine, seconds))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---- what must be as before ----------------------------------------------------------------------


def state(llm, after_steps=True):
    """Return everything that a timeout must not change."""
    engine = getattr(llm, "llm_engine", llm)
    check_laws(engine.scheduler)
    metrics = engine.metrics()
    places, runner = [], engine.runner
    if after_steps:  # in a step, each thread of the team has a core of its own
        runner.before_forward = lambda: places.append(team())
        llm.generate(PROMPTS, params(), use_tqdm=False)
        runner.before_forward = lambda: None
    return ({"places": sorted({str(place) for place in places})} if after_steps else {}) | {
        "unfinished": engine.has_unfinished_requests(),
        "free": metrics["num_free_blocks"],
        "owner": repr(engine._owner._thread),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
        "grad": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "handlers": [repr(signal.getsignal(number)) for number in (signal.SIGALRM, signal.SIGINT)],
    }


def team():
    """Return the single core of each thread that is pinned."""
    places = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    return sorted(core for place in places if len(place) == 1 for core in place)


def duration(use, *arguments):
    start = time.perf_counter()
    use(*arguments)
    return time.perf_counter() - start


def main(number, seed):
    rng = random.Random(seed)
    torch.set_num_threads(len(CORES))
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = lambda args: note(args.exc_value)
    settings = {"num_kv_blocks": 60, "max_num_seqs": 4}
    with LLM("demo", **settings) as llm, LLM("demo", async_scheduling=True, **settings) as other:
        ways = [generate, lambda llm: generate(llm, use_tqdm=False), stream, chat, steps, aborted]
        uses = [(one, way) for way in ways for one in (llm, other)]
        expected = [way(one) for one, way in uses]
        seconds = [min(duration(way, one) for _ in range(3)) for one, way in uses]
        before = [state(one) for one in (llm, other)]
        for i in range(number * 5 // 6):
            (one, way), answers, longest = rng.choice([*zip(uses, expected, seconds, strict=True)])
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.2 * longest))
                    found = way(one)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Timeout as error:
                note(error)
            else:
                check(found == answers, f"{i}: {way.__name__} {found}")
            note_changes(f"{i}", before, [llm, other], i % 10 == 9)
        check([way(one) for one, way in uses] == expected, "other answers")
    engine = AsyncLLM("demo", **settings)
    try:
        expected, stuck = run_async(engine), []
        shortest = min(duration(run_async, engine) for _ in range(3))
        before = [state(engine.llm_engine, False)]
        for i in range(number - number * 5 // 6):
            num_before = len(stacks)
            try:
                found = run_async(engine, rng.uniform(1e-5, 1.2 * shortest))
            except Timeout as error:
                note(error)
            else:
                check(found == expected, f"async {i}: {found}")
            stuck += stacks[num_before:][:1] if len(stacks) > num_before + 1 else []
            note_changes(f"async {i}", before, [engine.llm_engine], False)
        check(run_async(engine) == expected, "other answers of AsyncLLM")
    finally:
        engine.close()
    gc.collect()  # a task shows an exception that nobody has asked for when it is deleted
    # asyncio logs, and loses, what comes while it calls its exception handler
    lost = [x for i, x in enumerate(stacks) if i not in seen and "call_exception_handler" not in x]
    result = {"raised": len(stacks), "lost": lost, "stuck": stuck, "differences": differences}
    print(json.dumps(result))


def note_changes(i, before, engines, after_steps):
    """Note what is not as before within a minute: threads end late, and abort requests late."""
    deadline = time.monotonic() + 60
    while True:
        found = [
            f"{i}: {name} was {old[name]}, is {value}"
            for old, engine in zip(before, engines, strict=True)
            for name, value in state(engine, after_steps).items()
            if old[name] != value
        ]
        if not found or time.monotonic() > deadline:
            differences.extend(found)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
