"""Writes the pictures of the lessons: python -m docs.figures."""

import math
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #1f2328 }
    .panel { fill: #ffffff; stroke: #d0d7de }
    .a { fill: #9ecbff } .b { fill: #ffd8a8 } .c { fill: #b7e4c7 } .d { fill: #e5c7f5 }
    .none { fill: none; stroke: #8c959f } .line { fill: none; stroke: #8c959f; stroke-width: 1.5 }
    .shade { fill: #9ecbff; opacity: 0.25 } .shade2 { fill: #ffd8a8; opacity: 0.35 }
    .thick { fill: none; stroke: #1f2328; stroke-width: 4 }
    .soft { fill: #59636e } .mid { text-anchor: middle } .end { text-anchor: end } .bold { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc }
      .panel { fill: #0d1117; stroke: #3d444d }
      .a { fill: #1f5fae } .b { fill: #9a5b13 } .c { fill: #23733f } .d { fill: #7a3f9d }
      .shade { fill: #1f5fae } .shade2 { fill: #9a5b13 } .thick { stroke: #f0f6fc }
      .soft { fill: #9198a1 }
    }
  """


class Picture:
    """Draws an SVG, 850 pixels wide, in the style of all lessons. Each call adds to it."""

    def __init__(self, title: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 850 {height}" width="850" '
            f'height="{height}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}</style>",
            f'  <rect class="panel" x="0.5" y="0.5" width="849" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Add text that starts at x, or that `kind` centres at x or ends there."""
        self.parts.append(f'  <text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, words: str, kind: str, height: float = 26) -> None:
        """Add a box with words in its middle."""
        self.parts.append(
            f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, "mid")

    def boxes(self, x: float, y: float, width: float, words: list[str], kinds: str) -> None:
        """Add a row of boxes. Each letter of `kinds` is one box's kind, and "-" is an empty box."""
        for i, (word, kind) in enumerate(zip(words, kinds, strict=True)):
            self.box(x + i * (width + 4), y, width, word, "none" if kind == "-" else kind)

    def path(self, data: str, kind: str = "line") -> None:
        """Add a line, or an area of that kind."""
        self.parts.append(f'  <path class="{kind}" d="{data}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Add a straight arrow."""
        angle = math.atan2(to_y - y, to_x - x)
        head = [
            (to_x - 8 * math.cos(angle + turn), to_y - 8 * math.sin(angle + turn)) for turn in (0.5, -0.5)
        ]
        (ax, ay), (bx, by) = head
        self.path(
            f"M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f} "
            f"M{ax:.1f} {ay:.1f} L{to_x:.1f} {to_y:.1f} L{bx:.1f} {by:.1f}"
        )

    def svg(self) -> str:
        """Return the file's text."""
        return "\n".join([*self.parts, "</svg>", ""])


def causal_scores() -> Picture:
    """Draw lesson 1: the scores of four tokens, and the weights that a softmax of each row makes of them."""
    scores = [[1.2], [0.3, 1.8], [0.9, 2.1, 0.4], [0.1, 1.0, 2.2, 0.6]]
    words = ["the", "cat", "sat", "down"]
    p = Picture("Q times K transposed: a token's row has scores for itself and the tokens before it", 272)
    p.text(220, 28, "scores: Q Kᵀ / √d", "bold mid")
    p.text(660, 28, "weights of the values: each row sums to 1", "bold mid")
    p.text(84, 56, "Q ↓  K →", "end soft")
    for i, row in enumerate(scores):
        y, weights = 66 + 40 * i, [math.exp(score) for score in row]
        p.text(80, y + 22, words[i], "end")
        for j, word in enumerate(words):
            is_seen = j <= i
            p.box(92 + 66 * j, y, 60, f"{row[j]:.1f}" if is_seen else "-∞", "a" if is_seen else "none", 34)
            share = f"{weights[j] / sum(weights):.2f}" if is_seen else "0"
            p.box(532 + 66 * j, y, 60, share, "b" if is_seen else "none", 34)
            if i == 0:
                p.text(122 + 66 * j, 56, word, "mid")
                p.text(562 + 66 * j, 56, word, "mid")
    p.arrow(372, 143, 516, 143)
    p.text(444, 132, "softmax", "mid soft")
    p.text(
        20,
        256,
        "Rows are independent: with a KV cache (lesson 2), a step computes only the rows of its new tokens.",
        "soft",
    )
    return p


def shared_blocks() -> Picture:
    """Draw lesson 5: two tables point to the same blocks."""
    p = Picture("Two sequences share the blocks of their common beginning", 240)
    p.text(20, 44, "A's block table", "bold")
    p.boxes(150, 26, 60, ["1", "2", "3"], "aaa")
    p.text(20, 218, "B's block table", "bold")
    p.boxes(150, 200, 60, ["1", "2", "4"], "bbb")
    contents = [("1: abcd", 2, "c"), ("2: efgh", 2, "c"), ("3: ij..", 1, "a"), ("4: xy..", 1, "b")]
    for i, (words, users, kind) in enumerate(contents):
        p.box(150 + 175 * i, 100, 120, "", kind, 44)
        p.text(210 + 175 * i, 118, words, "mid")
        p.text(210 + 175 * i, 136, f"ref_count {users}", "mid bold" if users > 1 else "mid soft")
    p.arrow(270, 122, 323, 122)
    p.text(296, 114, "parent", "soft mid")
    p.text(690, 60, "keys: chained hashes", "soft")
    p.text(690, 78, "of full blocks only", "soft")
    for i, column in enumerate([0, 1, 2]):
        p.arrow(180 + 64 * i, 52, 210 + 175 * column, 98)
    for i, column in enumerate([0, 1, 3]):
        p.arrow(180 + 64 * i, 200, 210 + 175 * column, 146)
    return p


def free_lists() -> Picture:
    """Draw lesson 6: two lists of free blocks."""
    p = Picture("Free blocks: empty ones are allocated first, then the least recently used", 190)
    p.text(20, 32, "free blocks, in the order of allocation", "bold")
    p.boxes(20, 50, 76, ["4", "5", "6"], "---")
    p.text(20, 98, "no registered content", "soft")
    p.boxes(330, 50, 110, ["3: ijkl", "2: efgh", "1: abcd"], "bcc")
    p.text(330, 98, "evicted first: the tail", "soft")
    p.text(670, 98, "evicted last: the head", "soft end")
    p.arrow(262, 63, 322, 63)
    p.text(20, 140, "a hit removes a block from the list, wherever it is, and the block is in use again")
    p.text(20, 166, "when the block is freed again, it goes to the right end")
    p.arrow(790, 63, 680, 63)
    p.text(735, 44, "freed again", "soft mid")
    return p


def preemption() -> Picture:
    """Draw lesson 9: the blocks in use at each step."""
    p = Picture("B is preempted in step 3 and comes back in step 6", 250)
    held = [  # the owners of blocks 1 to 5 after each step, as the lesson prints them
        "aabb-", "aabb-", "aaffa", "aaffa", "aaffa", "ffbbb",
    ]  # fmt: skip
    for block in range(5):
        p.text(90, 68 + 32 * block, f"block {block + 1}", "end")
        for step, column in enumerate(held):
            kind = {"a": "a", "b": "b"}.get(column[block], "none")
            free = {"f": "free, cached", "-": "empty"}.get(column[block], column[block].upper())
            p.box(104 + 122 * step, 50 + 32 * block, 114, free, kind)
    for step in range(6):
        p.text(161 + 122 * step, 36, f"step {step + 1}", "mid bold")
    p.text(405, 236, "B is preempted", "mid")
    p.text(771, 236, "B hits its blocks", "mid")
    return p


def windows() -> Picture:
    """Draw lesson 18: the block tables of two groups."""
    p = Picture("The group with a window frees old blocks; both groups allocate from one pool", 184)
    p.text(20, 44, "full attention", "bold")
    p.boxes(180, 26, 76, ["1", "2", "3", "4", "5", "6", "13"], "aaaaaaa")
    p.text(20, 100, "window of 6", "bold")
    p.boxes(180, 82, 76, ["0", "0", "0", "0", "11", "12", "14"], "----bbb")
    for i, words in enumerate(["0..3", "4..7", "8..11", "12..15", "16..19", "20..23", "24..27"]):
        p.text(218 + 80 * i, 72, words, "soft mid")
    p.text(180, 132, "freed: the null block keeps the place", "soft")
    p.text(20, 166, "one pool, blocks of one size: a block belongs to the group that allocated it")
    return p


def drafts() -> Picture:
    """Draw lesson 14: five rows and three accepted tokens."""
    p = Picture(
        "Five rows in one step: two draft tokens are accepted, a third is not, and three tokens are kept",
        190,
    )
    p.text(130, 48, "computed", "end")
    p.boxes(150, 30, 100, ["d", "e", "f", "x", "y"], "abbbb")
    p.text(130, 118, "sampled after", "end")
    p.boxes(150, 100, 100, ["e", "f", "g", "y", "z"], "ccc--")
    for i in range(5):
        p.arrow(200 + 104 * i, 58, 200 + 104 * i, 98)
    for i, words in enumerate(["as drafted", "as drafted", "not x: kept", "discarded", "discarded"]):
        p.text(200 + 104 * i, 148, words, "mid soft")
    p.text(150, 176, "the last known token, and four draft tokens; three tokens are kept: e f g")
    return p


def sampling() -> Picture:
    """Draw lesson 13: a distribution before and after each edit, computed here."""
    logits = [2.0, 1.5, 1.0, 0.0, -1.0, -2.0]

    def softmax(values: list[float]) -> list[float]:
        weights = [math.exp(value) for value in values]
        return [weight / sum(weights) for weight in weights]

    shares = softmax(logits)
    top_p = [share if sum(shares[:i]) < 0.8 else 0.0 for i, share in enumerate(shares)]
    min_p = [share if share >= 0.3 * max(shares) else 0.0 for share in shares]
    panels = [
        ("unchanged", shares),
        ("temperature 0.5", softmax([value / 0.5 for value in logits])),
        ("temperature 2", softmax([value / 2 for value in logits])),
        ("top_k 2", [share / sum(shares[:2]) if i < 2 else 0.0 for i, share in enumerate(shares)]),
        ("top_p 0.8", [share / sum(top_p) for share in top_p]),
        ("min_p 0.3", [share / sum(min_p) for share in min_p]),
    ]
    p = Picture("A distribution of six tokens before and after temperature, top_k, top_p and min_p", 445)
    for i, (name, values) in enumerate(panels):
        x, y = 30 + 276 * (i % 3), 215 * (i // 3)
        p.text(x, y + 30, name, "bold")
        for j, value in enumerate(values):
            p.box(x + 40 * j, y + 190 - 150 * value, 34, "", "abcdab"[j], 150 * value)
            if value:
                p.text(x + 40 * j + 17, y + 185 - 150 * value, f"{value:.2f}".lstrip("0"), "mid soft")
            p.text(x + 40 * j + 17, y + 210, "ABCDEF"[j], "mid soft")
        p.path(f"M{x} {y + 190} h236")
    return p


def roofline() -> Picture:
    """Draw lesson 3: the milliseconds of a step against its rows, from the lesson's two limits."""
    p = Picture("An 8B model on an H100: a step's time is flat up to about 300 rows, then rises", 300)
    memory, row = 4.776, 2 * 8e9 / 989e12 * 1000
    left, bottom, wide, high = 80, 250, 700, 200

    def at(rows: float, ms: float) -> str:
        return f"{left + wide * rows / 600:.1f} {bottom - high * ms / 10:.1f}"

    edge, floor = f"{left + wide} {bottom}", f"{left} {bottom}"
    balance = memory / row
    p.path(f"M{at(0, memory)} L{at(balance, memory)} L{at(balance, 0)} L{floor} Z", "shade")
    p.path(f"M{at(balance, memory)} L{at(600, 600 * row)} L{edge} L{at(balance, 0)} Z", "shade2")
    p.path(f"M{at(0, memory)} L{at(balance, memory)} L{at(600, 600 * row)}", "thick")
    p.text(170, 243, "memory-bound: more rows are free", "soft")
    p.text(540, 225, "compute-bound", "soft")
    p.path(f"M{left} {bottom - high} V{bottom} H{left + wide}")
    p.path(f"M{at(0, memory)} L{at(600, memory)}")
    p.path(f"M{at(0, 0)} L{at(600, 600 * row)}")
    for rows in 0, 100, 200, 300, 400, 500, 600:
        p.text(left + wide * rows / 600, bottom + 20, str(rows), "mid soft")
    for ms in 0, 5, 10:
        p.text(left - 8, bottom - high * ms / 10 + 5, str(ms), "end soft")
    p.text(20, 30, "milliseconds of a step: the higher of the two lines (bold)", "bold")
    p.text(left + wide, bottom + 40, "rows of a step (an 8B model in bfloat16, no context)", "end")
    p.text(110, 146, "reading the weights")
    p.text(590, 90, "arithmetic", "end")
    p.text(424, 174, "balance: 295 rows", "soft")
    return p


def ranks() -> Picture:
    """Draw lesson 19: where ranks meet in a layer."""
    p = Picture(
        "A layer on two ranks: two pairs of matrices, each cut by columns, then by rows, then summed", 250
    )
    for i, kind in enumerate("ab"):
        y = 60 + 90 * i
        p.text(20, y + 35, f"rank {i}", "bold")
        p.box(90, y, 100, "Q, K, V", kind, 60)
        p.box(206, y, 100, "its heads", kind, 60)
        p.box(322, y, 70, "output", kind, 60)
        p.box(490, y, 100, "gate, up", kind, 60)
        p.box(606, y, 70, "down", kind, 60)
        p.arrow(394, y + 30, 418, y + 30)
        p.arrow(462, y + 30, 486, y + 30)
        p.arrow(678, y + 30, 712, y + 30)
    p.box(422, 60, 38, "+", "c", 150)
    p.box(716, 60, 38, "+", "c", 150)
    for x, words in (140, "columns"), (357, "rows"), (540, "columns"), (641, "rows"):
        p.text(x, 48, words, "mid soft")
    for x in 441, 735:
        p.text(x, 234, "all-reduce", "mid")
    p.text(20, 28, "attention, then MLP; both start from the whole row of each token", "bold")
    return p


def travel() -> Picture:
    """Draw lesson 20: blocks that travel from one engine to another."""
    p = Picture("Full blocks go from the prefill engine to a store, and from there to the decode engine", 230)
    p.text(20, 30, "prefill", "bold")
    p.text(340, 30, "store: key to block", "bold")
    p.text(640, 30, "decode", "bold")
    for i in range(5):
        y = 44 + 32 * i
        p.box(20, y, 150, f"block {i}", "a")
        p.box(340, y, 170, f"key {i}: tokens, K, V", "c")
        p.box(640, y, 150, f"block {i + 2}", "b")
        p.arrow(174, y + 13, 334, y + 13)
        p.arrow(514, y + 13, 634, y + 13)
    p.text(20, 222, "block 5, not full, stays")
    p.text(640, 222, "computes the last 3 tokens")
    return p


def programs() -> Picture:
    """Draw lesson 11: the grid of programs."""
    p = Picture("A grid of 3 sequences by 4 heads; each program loops over its sequence's blocks", 230)
    p.text(20, 30, "programs", "bold")
    p.text(400, 30, "the blocks that each program reads", "bold")
    tables = [("5", "2", "7"), ("1",), ("9", "3")]
    for i, (table, kind) in enumerate(zip(tables, "abc", strict=True)):
        y = 50 + 56 * i
        p.text(20, y + 18, f"sequence {i}")
        p.boxes(110, y, 56, [f"head {head}" for head in range(4)], kind * 4)
        p.arrow(354, y + 13, 394, y + 13)
        p.boxes(400, y, 70, list(table), kind * len(table))
    p.text(630, 68, "21 tokens: 5 of block 7's 8 slots", "soft")
    p.text(482, 124, "1 token", "soft")
    p.text(556, 180, "16 tokens", "soft")
    p.text(20, 222, "heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1", "soft")
    return p


def whole_engine() -> Picture:
    """Draw lesson 7: the parts of an engine, and what passes between them in a step."""
    p = Picture("A step: requests, scheduler, block tables, model runner, sampler, and back", 250)
    places = [
        (20, 84, "requests", "prompts", "a"), (180, 148, "scheduler", "waiting, running", "b"),
        (410, 148, "model runner", "one forward pass", "c"), (660, 148, "sampler", "a token per row", "d"),
    ]  # fmt: skip
    for x, width, name, what, kind in places:
        p.box(x, 60, width, name, kind, 40)
        p.text(x + width / 2, 118, what, "mid soft")
    for x, to, words in (106, 178, ""), (330, 408, "a batch"), (560, 658, "logits"):
        p.arrow(x, 80, to, 80)
        p.text((x + to) / 2, 72, words, "mid soft")
    p.box(180, 170, 148, "block manager", "b", 40)
    p.box(410, 170, 148, "KV cache", "c", 40)
    p.arrow(254, 124, 254, 168)
    p.text(246, 152, "allocate, free", "end soft")
    p.arrow(484, 124, 484, 168)
    p.text(492, 152, "write, attend", "soft")
    p.arrow(330, 190, 408, 190)
    p.text(369, 182, "tables", "mid soft")
    p.path("M734 60 V28 H254 V52")
    p.arrow(254, 44, 254, 58)
    p.text(494, 22, "sampled tokens: append them, finish sequences, free blocks", "mid soft")
    p.text(20, 238, "integers only on the left; tensors on the right", "soft")
    return p


def flat_rows() -> Picture:
    """Draw lesson 10: the rows of a batch, and the blocks that each attends to."""
    p = Picture("The rows of a batch belong to sequences, which reach their blocks through their tables", 250)
    p.text(20, 44, "rows", "bold")
    p.boxes(120, 26, 56, ["A", "e", "f", "g", "h", "i"], "abbbbb")
    for i, position in enumerate("401234"):
        p.text(148 + 60 * i, 70, position, "mid soft")
    p.text(20, 70, "positions", "soft")
    p.text(20, 96, "cu_seqlens_q", "soft")
    for x, words in (128, "0"), (182, "1"), (480, "6"):
        p.text(x, 96, words, "mid soft")
    p.text(20, 180, "blocks", "bold")
    p.boxes(120, 162, 150, ["1: abcd", "2: A...", "3: efgh", "4: i..."], "aabb")
    for x, width, blocks in (120, 56, (190, 340)), (180, 296, (500, 650)):
        p.path(f"M{x} 106 v6 h{width} v-6")
        for block in blocks:
            p.arrow(x + width / 2, 112, block, 158)
    p.text(190, 210, "A's table: 1, 2; seq_len 5", "soft")
    p.text(500, 210, "B's table: 3, 4; seq_len 5", "soft")
    p.text(20, 238, "dots are empty slots: j and k are B's next chunk", "soft")
    return p


def padding() -> Picture:
    """Draw lesson 12: three sequences in the graph for four."""
    p = Picture(
        "Three sequences run in the CUDA graph for four; the fourth row points to the null block", 200
    )
    rows = [
        ("A", "a", "7", "1 0 0"),
        ("B", "b", "13", "2 3 0"),
        ("C", "c", "17", "4 0 0"),
        ("padding", "none", "0", "0 0 0"),
    ]
    for x, words in (150, "token"), (310, "writes to slot"), (470, "block table"), (640, "output"):
        p.text(x, 30, words, "bold")
    for i, (name, kind, slot, table) in enumerate(rows):
        y = 42 + 34 * i
        p.text(20, y + 18, f"row {i}", "soft")
        p.box(150, y, 110, name, kind)
        p.box(310, y, 110, slot, kind)
        p.box(470, y, 110, table, kind)
        p.text(640, y + 18, "sampled" if i < 3 else "dropped", "" if i < 3 else "soft")
    p.text(640, 190, "slot 0 is in block 0, the null block", "soft end")
    return p


def regions() -> Picture:
    """Draw guide/regions.md: memory regions that the layers of all groups share."""
    p = Picture(
        "Five memory regions: region i holds the i-th layer of every group; a block has one owner", 262
    )
    p.text(20, 30, "one pool", "bold")
    owners = ["full", "window", "window 2", "full", "free"]
    for i, (owner, kind) in enumerate(zip(owners, "abcan", strict=True)):
        p.text(192 + 130 * i, 30, f"block {i + 7}: {owner}", "mid soft")
        for region in range(5):
            layers = {"a": 5 + 6 * region, "b": region, "c": 6 + region}
            words = f"layer {layers[kind]}" if kind in layers else ""
            p.box(132 + 130 * i, 42 + 36 * region, 120, words, kind if words else "none", 30)
    for region in range(5):
        p.text(20, 62 + 36 * region, f"region {region}", "soft")
    p.text(
        20,
        246,
        "a block is the same place in all five regions, and only the group that allocated it writes there",
    )
    return p


def state_slots() -> Picture:
    """Draw lesson 18: the states of one sequence, and those that are kept."""
    p = Picture("A recurrent state goes from slot to slot; those at the ends of full blocks are kept", 210)
    p.text(20, 44, "tokens", "bold")
    p.boxes(120, 26, 128, ["abcd", "efgh", "ij A A", "A"], "aaab")
    for i, block in enumerate("1234"):
        p.text(184 + 132 * i, 70, f"block {block}", "mid soft")
    p.text(20, 128, "states", "bold")
    places = [
        (92, "slot 0", "none", "zeros"),
        (340, "slot 3", "c", "after 8: kept"),
        (476, "slot 2", "c", "after 12: kept"),
        (620, "slot 4", "b", "A continues"),
    ]
    for x, name, kind, words in places:
        p.box(x, 110, 80, name, kind)
        p.text(x + 40, 156, words, "mid soft")
    for x, to in (174, 338), (422, 474), (558, 618):
        p.arrow(x, 123, to, 123)
    p.path("M498 108 V94 H534")
    p.arrow(534, 94, 534, 108)
    p.text(516, 90, "in place", "soft mid")
    p.text(20, 192, "A updates its own slot in place; once a state is kept, A writes to another slot", "soft")
    return p


PICTURES = {
    "01-scores.svg": causal_scores,
    "03-roofline.svg": roofline,
    "05-sharing.svg": shared_blocks,
    "06-free-lists.svg": free_lists,
    "07-engine.svg": whole_engine,
    "09-preemption.svg": preemption,
    "10-rows.svg": flat_rows,
    "11-kernel.svg": programs,
    "12-padding.svg": padding,
    "13-distributions.svg": sampling,
    "14-drafts.svg": drafts,
    "18-groups.svg": windows,
    "18-slots.svg": state_slots,
    "19-ranks.svg": ranks,
    "20-travel.svg": travel,
    "guide/regions.svg": regions,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw().svg())
