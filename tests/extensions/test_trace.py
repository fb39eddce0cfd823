"""A replay of a trace has every block table, count and queue of the engine."""

import itertools
import json
import re
import weakref
from collections import OrderedDict, deque
from pathlib import Path

import pytest
from hypothesis.stateful import invariant, run_state_machine_as_test

from nanoengine import LLM, SamplingParams
from nanoengine.engine import Prefix, tell_nobody
from nanoengine.extensions import trace
from nanoengine.extensions.speculative_decoding import DraftingScheduler
from nanoengine.extensions.trace import Tracer
from nanoengine.viewer import trace_page
from tests.helpers import DEMO, ask
from tests.laws import chain, tables_of
from tests.test_scheduling_machine import IN_SECONDS, CoreMachine, ExtendedMachine

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "trace.md"

# ---- the checker: it knows the documented schema, and nothing about the writer --------------------


class Replay:
    """Rebuilds the engine's state from events alone. An event that does not fit is an AssertionError."""

    def __init__(self):
        self.tokens: dict[int, list[int]] = {}
        self.order: dict[int, tuple[int, int]] = {}
        self.tables: dict[int, list[list[int]]] = {}  # of those that run, by group
        self.reported: dict[int, list[list[int]]] = {}  # the same, as the events state them
        self.computed: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.ended: dict[int, str] = {}
        # step -> the sequences that it samples, each with its drafts
        self.sampling: dict[int, dict[int, list[int]]] = {}
        self.prefix_of: dict[int, int] = {}  # seq -> prefix_id of its last registered block
        self.num_drafted = self.num_accepted = self.num_steps = 0
        self.needed_by: int | None = None  # the one for which others were preempted, until it has a block
        self.texts: dict[str, str] = {}

    def take(self, event):
        event = json.loads(json.dumps(event))  # a callable's events are those of a file
        if event["event"] == "start":
            self.start = event
            self.forget_blocks()
            return
        self.num_steps += 1
        assert event["step"] == self.num_steps
        assert not self.texts.keys() & event["texts"].keys(), "a token's text is written once"
        self.texts |= event["texts"]
        for change in event["changes"]:
            getattr(self, f"on_{change.pop('change')}")(**change)
        self.reported |= {table["seq"]: table["tables"] for table in event["block_tables"]}
        assert {seq: blocks for seq, blocks in self.reported.items() if blocks} == self.tables
        assert event["num_free_blocks"] == len(self.empty) + len(self.evictable)
        assert (event["num_running"], event["num_waiting"]) == (len(self.tables), len(self.waiting))

    def forget_blocks(self):
        self.ref_counts = dict.fromkeys(range(self.start["num_blocks"] + 1), 0)
        self.empty = deque(range(1, self.start["num_blocks"] + 1))
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.content: dict[int, tuple[int, ...]] = {}  # of registered blocks: all tokens up to their end
        self.prefixes: dict[int, tuple[int, int, int]] = {}  # block -> its prefix_id, its parent's, its group

    def pop_blocks(self, taken, evicted):
        lost = []
        for block in taken:
            if self.empty:
                assert self.empty.popleft() == block
            else:
                assert self.evictable.popitem(last=False)[0] == block
                del self.content[block], self.prefixes[block]
                lost.append(block)
            self.ref_counts[block] = 1
        assert lost == evicted

    def release(self, freed, shared):
        """Release blocks. The first ones become free, in this order; others hold the rest, too."""
        for block in freed + shared:
            self.ref_counts[block] -= 1
        assert not any(self.ref_counts[block] for block in freed)
        assert all(self.ref_counts[block] for block in shared)
        for block in freed:
            if block in self.content:
                self.evictable[block] = None
            else:
                self.empty.appendleft(block)

    def on_add(self, seq, request, priority, token_ids, max_num_tokens):
        assert seq not in self.tokens
        self.tokens[seq], self.order[seq] = token_ids, (priority, seq)
        self.waiting.add(seq)

    def head(self):
        return min(self.waiting, key=self.order.__getitem__)

    def on_refuse(self, seq, num_needed, num_free):
        assert seq == self.head()
        assert num_needed > num_free == len(self.empty) + len(self.evictable)

    def on_admit(self, seq, hits, revived, taken, evicted, num_computed_tokens):
        assert seq == self.head()
        # Blocks of the other groups may be older than the prefix.
        self.prefix_of[seq] = next((self.prefixes[block][0] for block in reversed(hits[0]) if block), 0)
        held = [block for blocks in hits for block in blocks if block]
        assert revived == [block for block in held if block in self.evictable]
        for block in held:
            self.evictable.pop(block, None)
            self.ref_counts[block] += 1
        self.pop_blocks(itertools.chain(*taken), evicted)
        self.tables[seq] = [one + other for one, other in zip(hits, taken, strict=True)]
        assert len(self.tables[seq]) == len(self.start["windows"])
        self.computed[seq] = num_computed_tokens
        self.waiting.remove(seq)

    def on_skip(self, seq, freed, shared):
        gone = freed + shared
        assert gone
        self.release(freed, shared)
        self.tables[seq] = [[0 if block in gone else block for block in table] for table in self.tables[seq]]

    def on_append(self, seq, taken, evicted):
        assert any(taken)
        assert self.needed_by in (seq, None), "another sequence was preempted for it"
        self.needed_by = None
        self.pop_blocks(itertools.chain(*taken), evicted)
        for table, blocks in zip(self.tables[seq], taken, strict=True):
            table += blocks

    def on_register(self, seq, first, blocks, prefix_ids):
        size = self.start["block_size"]
        assert blocks == [table[first : first + len(prefix_ids)] for table in self.tables[seq]]
        columns = zip(zip(*blocks, strict=True), prefix_ids, strict=True)
        for i, (column, prefix_id) in enumerate(columns, first):
            content, parent_id = tuple(self.tokens[seq][: (i + 1) * size]), self.prefix_of[seq]
            assert len(content) == (i + 1) * size
            self.prefix_of[seq] = prefix_id
            for group, block in enumerate(column):
                assert block not in self.content
                if block:
                    self.content[block], self.prefixes[block] = content, (prefix_id, parent_id, group)

    def on_schedule(self, num_tokens, chunks):
        assert num_tokens == sum(chunk["end"] - chunk["start"] for chunk in chunks)
        due: dict[int, list[int]] = {}
        for chunk in chunks:
            seq, start, end, draft = chunk["seq"], chunk["start"], chunk["end"], chunk["draft"]
            if draft is None:
                assert start == self.computed[seq]
                self.computed[seq] = end
                if chunk["samples"]:
                    due[seq] = []
            else:
                assert (start, end) == (self.computed[seq] + len(due[seq]), start + 1)
                assert chunk["samples"]
                due[seq].append(draft)
        if due:
            self.sampling[self.num_steps] = due

    def on_tokens(self, of_step, tokens, discarded):
        due = self.sampling.pop(of_step)
        assert all(step > of_step for step in self.sampling), "an older step is still in flight"
        assert sorted(due) == sorted([one["seq"] for one in tokens] + discarded)
        self.num_drafted += sum(map(len, due.values()))
        for one in tokens:
            seq, num_accepted = one["seq"], one["num_accepted"]
            assert seq not in self.ended
            # One token is sampled after the last accepted draft, unless none could be sampled.
            assert len(one["token_ids"]) - num_accepted in (0, 1)
            assert one["token_ids"][:num_accepted] == due[seq][:num_accepted]
            self.num_accepted += num_accepted
            self.tokens[seq] += one["token_ids"]
            if num_accepted:
                self.computed[seq] += num_accepted

    def on_free(self, seq, why, for_seq, freed, shared):
        tables = self.tables.pop(seq, [])
        self.computed.pop(seq, None)
        assert sorted(freed + shared) == sorted(block for table in tables for block in table if block)
        self.release(freed, shared)
        if why == "preempted":
            assert for_seq == seq or for_seq in self.tables
            self.needed_by = None if for_seq == seq else for_seq
            self.waiting.add(seq)
        else:
            assert for_seq is None
            assert (seq in self.waiting) != bool(tables)
            self.waiting.discard(seq)
            self.ended[seq] = why

    def on_fail(self, error):
        self.sampling.clear()
        self.needed_by = None

    def on_clear(self):
        self.waiting |= self.tables.keys()
        self.tables, self.computed = {}, {}
        self.forget_blocks()


def compare(replay: Replay, scheduler) -> None:
    """Assert that a replay equals the scheduler and its blocks."""
    blocks = scheduler.block_manager
    assert {seq.seq_id: tables_of(blocks, seq) for seq in scheduler.running} == replay.tables
    assert {seq.seq_id: seq.num_computed_tokens for seq in scheduler.running} == replay.computed
    assert {seq.seq_id for seq in scheduler.waiting} == replay.waiting
    for seq in scheduler.running + scheduler.waiting:
        assert seq.token_ids == replay.tokens[seq.seq_id]
    assert {block.block_id: block.ref_count for block in blocks.blocks} == replay.ref_counts
    assert list(blocks.free_blocks) == [*replay.empty, *replay.evictable]
    assert replay.prefixes.keys() == {block.block_id for block in blocks.blocks if block.prefix}
    names: dict[tuple[int, int], Prefix | None] = {(0, 0): None}  # by prefix_id and group
    for block_id, (prefix_id, parent_id, group) in replay.prefixes.items():
        prefix = blocks.blocks[block_id].prefix
        key = chain(replay.content[block_id], blocks.block_size, blocks.hash_function)
        assert prefix is not None
        assert prefix.key == key._replace(group=group)
        assert names.setdefault((parent_id, 0), prefix.parent) is prefix.parent
        assert names.setdefault((prefix_id, group), prefix) is prefix
    first_group = [prefix for (_, group), prefix in names.items() if group == 0]
    assert len({*first_group}) == len(first_group), "a prefix has two ids"
    if isinstance(scheduler, DraftingScheduler):
        assert scheduler.num_drafted.total() == replay.num_drafted
        assert scheduler.num_accepted.total() == replay.num_accepted


# ---- workloads of all kinds ----------------------------------------------------------------------


class Traced(CoreMachine):
    """A random walk that replays its trace: the state is compared before each step, and after each rule."""

    def begin(self, size):
        super().begin(size)
        self.replay = Replay()
        self.tracer = Tracer(self.world.scheduler, self.replay.take)

    def step_once(self):
        self.replay_agrees()
        super().step_once()

    @invariant()
    def replay_agrees(self):
        if hasattr(self, "tracer"):
            self.tracer.end_step()
            compare(self.replay, self.world.scheduler)
            ends = {seq.seq_id: seq.finish_reason for seq in self.seqs if seq.is_finished}
            assert ends == self.replay.ended

    def teardown(self):
        super().teardown()
        self.replay_agrees()


class TracedExtended(Traced, ExtendedMachine):
    pass


@pytest.mark.parametrize("how", IN_SECONDS)
@pytest.mark.parametrize("machine", [Traced, TracedExtended])
def test_the_replay_of_a_random_walk_agrees_with_the_scheduler(machine, how):
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_real_engine_s_file_replays_and_its_tokens_are_the_answers(tmp_path, async_scheduling):
    path, replay = tmp_path / "run.jsonl", Replay()
    texts = ["What is 27 + 58?", "Count from 8 to 21."] * 2
    texts[3] = "Spell the word attention backwards."
    sizes = {"num_kv_blocks": 14, "block_size": 4, "max_num_batched_tokens": 16}
    with LLM(DEMO, **sizes, async_scheduling=async_scheduling, trace=path) as llm:
        chats = [[{"role": "user", "content": text}] for text in texts]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        for line in path.read_text().splitlines():  # each line is written as soon as its step ended
            replay.take(json.loads(line))
        compare(replay, llm.scheduler)
        assert llm.metrics()["num_preemptions"] > 0
        assert llm.metrics()["prefix_cache_hits"] > 0
    for seq, output in enumerate(outputs):
        assert replay.tokens[seq] == output.prompt_token_ids + output.outputs[0].token_ids
        assert replay.ended[seq] == output.outputs[0].finish_reason
    said = "".join(replay.texts[str(token)] for token in replay.tokens[3])
    assert said.endswith(f"{texts[3]}<|im_end|>\n<|im_start|>assistant\nnoitnetta<|im_end|>")
    start, *steps = trace_page.load(path)
    assert start["model"] == "demo"  # not the path
    assert all(sum(step["seconds"].values()) > 0 for step in steps)
    changes = [(step["step"], change) for step in steps for change in step["changes"]]
    delays = {step - change["of_step"] for step, change in changes if change["change"] == "tokens"}
    assert delays == {int(async_scheduling)}
    explained = {*re.findall(r"\w+", GUIDE.read_text().split("## The format of a trace")[1])}
    assert {name for event in (start, *steps, *(one for _, one in changes)) for name in event} <= explained


def test_a_failed_step_is_in_the_trace_with_its_reason(tmp_path, monkeypatch):
    replay = Replay()
    events: list = []
    with LLM(DEMO, num_kv_blocks=8, block_size=8, trace=lambda e: (events.append(e), replay.take(e))) as llm:
        monkeypatch.setattr(llm.llm_engine.runner, "launch", lambda *args: 1 / 0)
        llm.add_request("a", "Who are you?")
        with pytest.raises(ZeroDivisionError):
            llm.step()
        compare(replay, llm.scheduler)
        error = "ZeroDivisionError('division by zero')"
        assert events[-1]["changes"][-2] == {"change": "fail", "error": error}
        monkeypatch.undo()
        llm.abort_request("a")
    assert replay.ended == {0: "abort"}  # written when the engine closed
    assert events[1]["changes"][0]["request"] == "a"


# ---- around it -----------------------------------------------------------------------------------


def test_only_a_traced_engine_has_an_observer_and_no_method_is_replaced():
    with LLM(DEMO, num_kv_blocks=8) as llm:
        assert llm.scheduler.tell is llm.scheduler.block_manager.tell is tell_nobody
    with LLM(DEMO, num_kv_blocks=8, trace=lambda event: None) as llm:
        owners = llm.scheduler, llm.scheduler.block_manager
        assert all(owner.tell is not tell_nobody for owner in owners)
        assert not any(vars(owner).keys() & vars(type(owner)).keys() for owner in owners)
        llm.close()
        assert all(owner.tell is tell_nobody for owner in owners)


@pytest.mark.parametrize("culprit", ["target", "tokenizer"])
def test_a_failing_target_or_tokenizer_ends_the_trace_but_not_the_request(culprit, caplog, monkeypatch):
    events: list = []

    def write(event):
        if culprit == "target" and event["event"] == "step":
            raise OSError("no space left on device")
        events.append(event)

    if culprit == "tokenizer":
        monkeypatch.setattr(trace, "_token_text", lambda backend, token_id: 1 / 0)
    with caplog.at_level("ERROR", "nanoengine"), LLM(DEMO, num_kv_blocks=20, trace=write) as llm:
        output = llm.chat([{"role": "user", "content": "What is 27 + 58?"}], use_tqdm=False)[0]
    assert output.outputs[0].text == "27 + 58 = 85"
    assert [event["event"] for event in events] == ["start"]
    assert [record.message for record in caplog.records] == ["the trace cannot be written and ends here"]


def test_an_unusable_target_is_refused(tmp_path):
    with pytest.raises(TypeError, match="trace must be a path or a function, got 5"):
        LLM(DEMO, trace=5)
    with pytest.raises(FileNotFoundError):
        LLM(DEMO, num_kv_blocks=8, trace=tmp_path / "nowhere" / "run.jsonl")


def test_the_memory_of_a_traced_engine_is_released_at_once(no_gc):
    """The tracer and what it wraps hold each other, but nothing of the device."""
    llm = LLM(DEMO, num_kv_blocks=8, trace=lambda event: None)
    ask(llm, "a")
    cache = weakref.ref(llm.llm_engine.runner.caches[0].k)
    del llm
    assert cache() is None


# ---- other formats -------------------------------------------------------------------------------


def test_perfetto_s_events_are_the_steps_end_to_end(tmp_path):
    lines, chrome = tmp_path / "run.jsonl", tmp_path / "run.json"
    with LLM(DEMO, num_kv_blocks=12, block_size=8, max_num_batched_tokens=16, trace=lines) as llm:
        chats = [[{"role": "user", "content": text}] for text in ("Count from 8 to 21.", "Who are you?")]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    trace_page.main([str(lines), "-o", str(chrome)])
    steps = trace_page.load(lines)[1:]
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    phases = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert len(phases) == 5 * len(steps)
    for before, after in itertools.pairwise(phases):
        assert before["ts"] + before["dur"] <= after["ts"] + 1  # microsecond: rounded seconds
    for step, last in zip(steps, phases[4::5], strict=True):
        assert last["ts"] + last["dur"] == pytest.approx(step["time_s"] * 1e6)
    for seq, output in enumerate(outputs):
        track = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (1, seq)]
        num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        assert sum(one["args"]["tokens"] for one in track) == num_tokens - 1  # the last one is not computed
        assert [one["cat"] for one in track].count("decode") == len(output.outputs[0].token_ids) - 1
    ends = [event["name"] for event in events if event["ph"] == "i"]
    assert ends == [output.outputs[0].finish_reason for output in outputs]
    in_use = [event["args"]["blocks in use"] for event in events if event["name"] == "blocks in use"]
    assert in_use == [12 - step["num_free_blocks"] for step in steps]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace: its first line must be a start event"),
        (b'{"event": "step"}\n', "is not a trace: its first line must be a start event"),
        (b'{"event": "start", "version": 99}\n', "has version 99 of the format, but this nanoengine reads 1"),
        (b"PK", "line 1: Expecting value"),
        (b'{"event": "\xff"}\n{}\n', "line 1: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_in_one_line(tmp_path, content, message, capsys):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        trace_page.main([str(path), "-o", str(tmp_path / "run.html")])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_last_line_cut_off_by_a_crash_is_ignored(tmp_path):
    whole, cut, again = (tmp_path / f"{name}.jsonl" for name in ("run", "cut", "again"))
    with LLM(DEMO, num_kv_blocks=12, trace=whole) as llm:
        ask(llm, "a", max_tokens=3)
    cut.write_text(whole.read_text()[:-20])
    assert trace_page.load(cut) == trace_page.load(whole)[:-1]
    trace_page.save(trace_page.load(whole), again)
    assert again.read_text() == whole.read_text()
