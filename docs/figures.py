"""Writes the pictures of lessons 4, 5, 8, 11 to 13 and 15 to 19: python -m docs.figures."""

import math
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #1f2328 }
    .panel { fill: #ffffff; stroke: #d0d7de }
    .a { fill: #9ecbff } .b { fill: #ffd8a8 } .c { fill: #b7e4c7 } .d { fill: #e5c7f5 }
    .none { fill: none; stroke: #8c959f } .line { fill: none; stroke: #8c959f; stroke-width: 1.5 }
    .soft { fill: #59636e } .mid { text-anchor: middle } .end { text-anchor: end } .bold { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc }
      .panel { fill: #0d1117; stroke: #3d444d }
      .a { fill: #1f5fae } .b { fill: #9a5b13 } .c { fill: #23733f } .d { fill: #7a3f9d }
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

    def path(self, data: str) -> None:
        """Add a line."""
        self.parts.append(f'  <path class="line" d="{data}"/>')

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


def shared_blocks() -> Picture:
    """Draw lesson 4: two tables point to the same blocks."""
    p = Picture("Two sequences share the blocks of their common beginning", 226)
    p.text(20, 44, "A's block table", "bold")
    p.boxes(150, 26, 60, ["1", "2", "3"], "aaa")
    p.text(20, 204, "B's block table", "bold")
    p.boxes(150, 186, 60, ["1", "2", "4"], "bbb")
    contents = [("1", "abcd", "c"), ("2", "efgh", "c"), ("3", "ij..", "a"), ("4", "xy..", "b")]
    for i, (block, letters, kind) in enumerate(contents):
        p.box(150 + 175 * i, 100, 120, f"{block}: {letters}", kind)
    p.arrow(270, 113, 323, 113)
    p.text(296, 92, "parent", "soft mid")
    p.text(690, 60, "keys: chained hashes", "soft")
    p.text(690, 78, "of full blocks only", "soft")
    for i, column in enumerate([0, 1, 2]):
        p.arrow(180 + 64 * i, 52, 210 + 175 * column, 98)
    for i, column in enumerate([0, 1, 3]):
        p.arrow(180 + 64 * i, 186, 210 + 175 * column, 128)
    p.text(690, 172, "in use by 2, 2, 1 and 1", "soft")
    return p


def free_lists() -> Picture:
    """Draw lesson 5: two lists of free blocks."""
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
    p.arrow(690, 63, 790, 63)
    return p


def preemption() -> Picture:
    """Draw lesson 8: the blocks in use at each step."""
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
    """Draw lesson 12: the block tables of two groups."""
    p = Picture("The group with a window frees old blocks; both groups allocate from one pool", 200)
    p.text(20, 44, "full attention", "bold")
    p.boxes(180, 26, 76, ["1", "2", "3", "4", "5", "6", "13"], "aaaaaaa")
    p.text(20, 100, "window of 6", "bold")
    p.boxes(180, 82, 76, ["0", "0", "0", "0", "11", "12", "14"], "----bbb")
    for i, words in enumerate(["0..3", "4..7", "8..11", "12..15", "16..19", "20..23", "24..27"]):
        p.text(218 + 80 * i, 72, words, "soft mid")
    p.text(180, 132, "freed: the null block keeps the place", "soft")
    p.text(20, 166, "one pool, blocks of one size: a block is one place in every memory region,")
    p.text(20, 186, "and belongs to the group that allocated it")
    return p


def drafts() -> Picture:
    """Draw lesson 13: five rows and three accepted tokens."""
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
    """Draw lesson 11: a distribution before and after each edit, computed here."""
    logits = [2.0, 1.5, 1.0, 0.0, -1.0, -2.0]

    def softmax(values: list[float]) -> list[float]:
        weights = [math.exp(value) for value in values]
        return [weight / sum(weights) for weight in weights]

    shares = softmax(logits)
    top_p = [share if sum(shares[:i]) < 0.8 else 0.0 for i, share in enumerate(shares)]
    panels = [
        ("unchanged", shares),
        ("temperature 0.5", softmax([value / 0.5 for value in logits])),
        ("temperature 2", softmax([value / 2 for value in logits])),
        ("top_k 2", [share / sum(shares[:2]) if i < 2 else 0.0 for i, share in enumerate(shares)]),
        ("top_p 0.8", [share / sum(top_p) for share in top_p]),
    ]
    p = Picture("A distribution of six tokens before and after temperature, top_k and top_p", 230)
    for i, (name, values) in enumerate(panels):
        x = 24 + 164 * i
        p.text(x, 30, name, "bold")
        for j, value in enumerate(values):
            p.box(x + 24 * j, 190 - 160 * value, 20, "", "abcdab"[j], 160 * value)
            p.text(x + 24 * j + 10, 210, "ABCDEF"[j], "mid soft")
        p.path(f"M{x} 190 h144")
    return p


def roofline() -> Picture:
    """Draw lesson 15: the milliseconds of a step against its rows, from the lesson's two limits."""
    p = Picture("An 8B model on an H100: a step's time is flat up to about 300 rows, then rises", 300)
    memory, row = 4.776, 2 * 8e9 / 989e12 * 1000
    left, bottom, wide, high = 80, 250, 700, 200

    def at(rows: float, ms: float) -> str:
        return f"{left + wide * rows / 600:.1f} {bottom - high * ms / 10:.1f}"

    p.path(f"M{left} {bottom - high} V{bottom} H{left + wide}")
    p.path(f"M{at(0, memory)} L{at(600, memory)}")
    p.path(f"M{at(0, 0)} L{at(600, 600 * row)}")
    for rows in 0, 100, 200, 300, 400, 500, 600:
        p.text(left + wide * rows / 600, bottom + 20, str(rows), "mid soft")
    for ms in 0, 5, 10:
        p.text(left - 8, bottom - high * ms / 10 + 5, str(ms), "end soft")
    p.text(20, 30, "milliseconds of a step: the higher of the two lines", "bold")
    p.text(left + wide, bottom + 40, "rows of a step (an 8B model in bfloat16, no context)", "end")
    p.text(110, 146, "reading the weights")
    p.text(590, 90, "arithmetic", "end")
    p.text(424, 174, "balance: 295 rows", "soft")
    return p


def policies() -> Picture:
    """Draw lesson 16: three requests in two orders."""
    p = Picture("Three prompts in two orders: the short ones wait less, the long one waits more", 190)
    orders = ("first come", [("long", 400, "a"), ("short", 80, "b"), ("short", 80, "c")])
    shortest = ("shortest", [("short", 80, "b"), ("short", 80, "c"), ("long", 400, "a")])
    for i, (name, jobs) in enumerate([orders, shortest]):
        x, y = 130.0, 40.0 + 70 * i
        p.text(20, y + 18, name, "bold")
        for words, width, kind in jobs:
            p.box(x, y, width - 4, words, kind)
            p.text(x + width - 4, y + 46, f"{(x + width - 130) / 80:g}", "end soft")
            x += width
    p.text(
        130, 178, "below each prompt: the time of its first token. Median 6, then 2; longest 7 in both orders"
    )
    return p


def ranks() -> Picture:
    """Draw lesson 17: where ranks meet in a layer."""
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
    """Draw lesson 18: blocks that travel from one engine to another."""
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
    """Draw lesson 19: the grid of programs."""
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
    p.text(630, 68, "21 tokens: five slots of block 7", "soft")
    p.text(482, 124, "1 token", "soft")
    p.text(556, 180, "16 tokens", "soft")
    p.text(20, 222, "heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1", "soft")
    return p


PICTURES = {
    "04-sharing.svg": shared_blocks,
    "05-free-lists.svg": free_lists,
    "08-preemption.svg": preemption,
    "11-distributions.svg": sampling,
    "12-groups.svg": windows,
    "13-drafts.svg": drafts,
    "15-roofline.svg": roofline,
    "16-policies.svg": policies,
    "17-ranks.svg": ranks,
    "18-travel.svg": travel,
    "19-kernel.svg": programs,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw().svg())
