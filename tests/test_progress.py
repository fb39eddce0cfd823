"""Startup shows what it is doing."""

import io
import logging
import sys

import pytest

from nanoengine import LLM, steps


class Screen(io.StringIO):
    """A stderr that is a terminal, or not."""

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_only_on_a_terminal_and_only_if_it_takes_long(is_terminal, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal))
    assert [*steps.bar("packing", range(9))] == [*range(9)]
    assert screen.getvalue() == ""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for _ in steps.bar("packing", range(9)):
        now[0] += 0.6
    assert ("packing:" in screen.getvalue()) == is_terminal
    with steps.phase("kernels", "compiling"):
        pass
    assert caplog.messages == ["compiling"] * is_terminal


def test_startup_logs_one_line_and_the_seconds_of_its_phases_at_level_debug(caplog):
    LLM("demo", num_kv_blocks=9).close()
    (line,) = caplog.messages
    assert line.startswith("Qwen3ForCausalLM")
    with caplog.at_level(logging.DEBUG, "nanoengine"):
        LLM("demo", num_kv_blocks=9).close()
    names = [record.args[0] for record in caplog.records if record.levelno == logging.DEBUG]
    assert names == ["header", "config", "tokenizer", "kernels", "weights", "packing", "KV cache"]
