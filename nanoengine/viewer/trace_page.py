"""Shows what an engine did: turns a trace into a page to step through, or into a timeline.

    nanoengine trace run.jsonl -o run.html    # in any browser
    nanoengine trace run.jsonl -o run.json    # Chrome trace events, for ui.perfetto.dev
    nanoengine trace -o live.html             # the same page, with the bundled model instead of a trace

The trace is what `LLM(..., trace="run.jsonl")` writes; docs/guide/trace.md explains its fields.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors

from nanoengine.extensions.trace import VERSION, Event
from nanoengine.flags import FlexibleArgumentParser

PAGE = files("nanoengine.viewer").joinpath("page")
RECEIPT = '<section class=card><h2>Where the time went</h2><pre style="overflow-x:auto">{}</pre></section>'
LESSON = "04-paging.md"  # if this lesson is in the page's directory, all lessons are


def load(path: str | Path) -> list[Event]:
    """Read the events of a trace in JSON lines, without a last line that was cut off."""
    lines = Path(path).read_bytes().splitlines()  # json.loads accepts UTF-8 bytes
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) or number == 1:
                raise ValueError(f"{path}, line {number}: {error}") from error
    start = events[0] if events else None
    if not isinstance(start, dict) or start.get("event") != "start":
        raise ValueError(f"{path} is not a trace: its first line must be a start event")
    if (found := start["version"]) != VERSION:
        raise ValueError(f"{path} has version {found} of the format, but this nanoengine reads {VERSION}")
    return events


def save(events: Iterable[Event], path: str | Path, model: Any = None, receipt: str = "") -> None:
    """Write a trace in the format of the name's ending: .jsonl, .html (a page), .json (Chrome trace events).

    The page of a `model`, as `pack_model` returns it, runs the engine.
    """
    path = Path(path)
    if path.suffix == ".html":
        text = page(events, ".md" if (path.parent / LESSON).exists() else "", model, receipt)
    elif path.suffix == ".json":
        text = json.dumps({"traceEvents": list(chrome_events(events)), "displayTimeUnit": "ms"})
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
    else:
        raise ValueError(f"the name of a trace must end in .html, .json or .jsonl, got {path}")
    path.write_text(text, encoding="utf-8")


def page(events: Iterable[Event], lessons: str = "", model: Any = None, receipt: str = "") -> str:
    """Return a trace as one HTML page, which works offline. With a model, the page runs the engine.

    `lessons` is the file ending of the lessons that the page links to; "": no links.
    """

    def embed(value: Any) -> str:
        # In JSON, "<" occurs only in strings, where the escape means the same. No prompt can end the page.
        return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")

    def join(*names: str) -> str:
        return "".join(PAGE.joinpath(name).read_text(encoding="utf-8") for name in names)

    is_live = model is not None
    code = join("state.js", "story.js", "draw.js", "run.js", *(["live.js"] if is_live else []))
    parts = {
        "style": join("page.css"),
        "receipt": receipt and RECEIPT.format(escape(receipt)),
        "words": embed(json.loads(join("words.json"))),
        "model": embed(model),
        "trace": "[" + ",\n".join(map(embed, events)) + "]",
        "engine": join("engine.js", *(["model.js"] if is_live else [])),
        "code": code.replace("/* lessons */", lessons),
    }
    return re.sub(r"/\* (\w+) \*/", lambda place: parts[place[1]], join("page.html"))


def pack_model() -> dict[str, Any]:
    """Return the bundled model for the live page: its config, tokenizer, and weights as float16."""
    demo = files("nanoengine.demo")
    tensors = load_tensors(demo.joinpath("model.safetensors").read_bytes())
    numbers = np.concatenate([tensor.astype(np.float16).ravel() for tensor in tensors.values()])
    # All low bytes, then all high bytes, which compress well.
    planes = numbers.astype("<f2").view(np.uint8).reshape(-1, 2).T.tobytes()
    return {
        "config": json.loads(demo.joinpath("config.json").read_text()),
        "stop_ids": json.loads(demo.joinpath("generation_config.json").read_text())["eos_token_id"],
        "tokenizer": json.loads(demo.joinpath("tokenizer.json").read_text()),
        "shapes": {re.sub(r"^model\.|\.weight$", "", name): one.shape for name, one in tensors.items()},
        "weights": base64.b64encode(gzip.compress(planes, mtime=0)).decode(),
    }


def chrome_events(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events: a track of the engine's phases, a track per sequence, and counters.

    Source: the Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    engine, sequences = 0, 1  # process ids; a sequence is a thread

    def mark(ph: str, name: str, pid: int, tid: int = 0, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "name": name, "pid": pid, "tid": tid, **more}

    yield mark("M", "process_name", engine, args={"name": "engine"})
    yield mark("M", "thread_name", engine, args={"name": "phases of a step"})
    yield mark("M", "process_name", sequences, args={"name": "sequences"})
    num_blocks, num_prompt_tokens = 0, dict[int, int]()
    for event in events:
        if event["event"] == "start":
            num_blocks = event["num_blocks"]
            continue
        end, step = event["time_s"] * 1e6, {"step": event["step"]}  # microseconds, like all times here
        begin = now = end - sum(event["seconds"].values()) * 1e6
        for phase, seconds in event["seconds"].items():
            yield mark("X", phase, engine, ts=now, dur=seconds * 1e6, args=step)
            now += seconds * 1e6
        for change in event["changes"]:
            if change["change"] == "add":
                num_prompt_tokens[change["seq"]] = len(change["token_ids"])
                name = f"request {change['request']}, sequence {change['seq']}"
                yield mark("M", "thread_name", sequences, change["seq"], args={"name": name})
            elif change["change"] == "schedule":
                for chunk in change["chunks"]:
                    num_tokens = chunk["end"] - chunk["start"]
                    is_prompt = chunk["start"] < num_prompt_tokens[chunk["seq"]]
                    kind = "prompt" if is_prompt else "decode" if num_tokens == 1 else "again"
                    kind = kind if chunk["draft"] is None else "draft"
                    name, args = f"{kind} [{chunk['start']}, {chunk['end']})", step | {"tokens": num_tokens}
                    place = {"ts": begin, "dur": end - begin}
                    yield mark("X", name, sequences, chunk["seq"], cat=kind, **place, args=args)
            elif change["change"] == "free":
                yield mark("i", change["why"], sequences, change["seq"], s="t", ts=end, args=change)
        counters = {"blocks in use": num_blocks - event["num_free_blocks"]}
        counters |= {f"sequences {state}": event[f"num_{state}"] for state in ("running", "waiting")}
        for name, value in counters.items():
            yield mark("C", name, engine, ts=end, args={name: value})


def main(arguments: list[str] | None = None) -> None:
    """Convert a trace to the format that the output's name ends with, or make the page of the live engine."""
    parser = FlexibleArgumentParser("nanoengine trace", description=main.__doc__)
    help_text = "JSON lines, as LLM(..., trace=...) writes them; default: a page that runs the bundled model"
    parser.add_argument("trace", type=Path, nargs="?", help=help_text)
    parser.add_argument("-o", "--output", type=Path, required=True, help="run.html, or run.json for Perfetto")
    args = parser.parse_args(arguments)
    if args.trace is None and args.output.suffix != ".html":
        parser.error("only a page (.html) can be made without a trace")
    try:
        save(load(args.trace) if args.trace else [], args.output, None if args.trace else pack_model())
    except (OSError, ValueError) as error:
        parser.error(str(error))
