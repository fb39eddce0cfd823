"""A stand-in for openvino-genai 2026.4, with the names and arguments that its type stubs list.

It refuses what the real one refuses or silently ignores, and samples meaningless tokens. `openvino.Tensor` is
here too.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy

__version__ = "2026.4"


class Tensor:
    """Stands in for `openvino.Tensor`, which the real package defines."""

    def __init__(self, array):
        assert isinstance(array, numpy.ndarray)
        self.data = array


class SchedulerConfig:
    """Takes no arguments, like the real class, and has these attributes among others."""

    __slots__ = "cache_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs"


@dataclass(slots=True, kw_only=True)
class GenerationConfig:
    """Ignores unknown names in the real package. Here they are errors."""

    max_new_tokens: int
    ignore_eos: bool = False
    eos_token_id: int = -1
    temperature: float = 1.0
    do_sample: bool = False


class ContinuousBatchingPipeline:
    made: ClassVar[list["ContinuousBatchingPipeline"]] = []  # for the tests

    def __init__(self, models_path, scheduler_config, device, properties):
        names = "openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"
        assert all(Path(models_path, name).is_file() for name in names)
        assert isinstance(scheduler_config, SchedulerConfig)
        assert scheduler_config.cache_size > 0
        assert device == "CPU"
        if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # "could not create a primitive descriptor"
            assert properties["INFERENCE_PRECISION_HINT"] == "f32"
            assert properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0
        self.models_path, self.scheduler_config, self.properties = models_path, scheduler_config, properties
        self.running, self.prompts, self.num_steps = [], [], 0
        self.made.append(self)

    def add_request(self, request_id, input_ids, config):
        assert isinstance(input_ids, Tensor)
        assert input_ids.data.dtype == numpy.int64
        (prompt,) = input_ids.data.tolist()
        assert config.eos_token_id >= 0  # "'stop_token_ids' must be non-negative"
        assert config.ignore_eos
        assert config.do_sample or config.temperature == 1.0
        assert request_id == len(self.prompts)
        self.prompts.append(prompt)
        unread = []
        handle = SimpleNamespace(can_read=lambda: bool(unread), read=lambda: {0: unread.pop(0)})
        self.running.append((unread, [7] * config.max_new_tokens))
        return handle

    def has_non_finished_requests(self):
        return bool(self.running)

    def step(self):
        self.num_steps += 1
        for unread, left in self.running:
            unread.append(SimpleNamespace(generated_ids=[left.pop()]))
        self.running = [(unread, left) for unread, left in self.running if left]
