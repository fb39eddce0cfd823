"""A stand-in for openvino-genai 2026.4, with the names and arguments that its type stubs list.

It refuses what the real one refuses or silently ignores, and samples meaningless tokens. `openvino.Tensor` is
here too.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy

__version__ = "2026.4"
FORMATS = {
    "fp32",
    "fp16",
    "int8",
    "int4",
    "mxfp4",
    "nf4",
    "cb4",
}  # optimum-cli export openvino --weight-format


class Tensor:
    """Stands in for `openvino.Tensor`, which the real package defines."""

    def __init__(self, array):
        assert isinstance(array, numpy.ndarray)
        self.data, self.shape = array, array.shape


@dataclass(slots=True)
class SchedulerConfig:
    """Takes no arguments, like the real class, and has only these attributes."""

    max_num_batched_tokens: int = field(init=False, default=256)
    num_kv_blocks: int = field(init=False, default=0)
    cache_size: int = field(init=False, default=0)
    num_linear_attention_blocks: int = field(init=False, default=0)
    dynamic_split_fuse: bool = field(init=False, default=True)
    max_num_seqs: int = field(init=False, default=256)
    enable_prefix_caching: bool = field(init=False, default=False)
    use_cache_eviction: bool = field(init=False, default=False)
    use_sparse_attention: bool = field(init=False, default=False)


@dataclass(slots=True, kw_only=True)
class GenerationConfig:
    """Ignores unknown names in the real package. Here they are errors."""

    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos: bool = False
    eos_token_id: int = -1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 2**64 - 1
    do_sample: bool = False
    rng_seed: int = 0

    def validate(self):
        if self.eos_token_id < 0:
            raise RuntimeError("'stop_token_ids' must be non-negative, but it contains a value -1")
        assert self.max_new_tokens > 0
        assert self.do_sample or self.temperature == 1.0


class GenerationHandle:
    def __init__(self, config):
        self.config, self.unread, self.num_tokens = config, [], 0

    def can_read(self):
        return bool(self.unread)

    def read(self):
        assert self.unread
        return {0: self.unread.pop(0)}


class ContinuousBatchingPipeline:
    made: ClassVar[list["ContinuousBatchingPipeline"]] = []  # for the tests

    def __init__(self, models_path, scheduler_config, device, properties=None):
        names = "openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"
        assert all(Path(models_path, name).is_file() for name in names)
        assert isinstance(scheduler_config, SchedulerConfig)
        assert scheduler_config.cache_size > 0 or scheduler_config.num_kv_blocks > 0
        assert device == "CPU"
        names = {"INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
        assert set(properties or {}) <= names
        if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # "could not create a primitive descriptor"
            assert properties["INFERENCE_PRECISION_HINT"] == "f32"
            assert properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0
        self.models_path, self.scheduler_config, self.properties = models_path, scheduler_config, properties
        self.handles, self.prompts, self.num_steps = {}, [], 0
        self.made.append(self)

    def add_request(self, request_id, input_ids, generation_config):
        assert isinstance(input_ids, Tensor)
        assert input_ids.data.dtype == numpy.int64
        assert input_ids.shape[0] == 1
        assert len(input_ids.shape) == 2
        generation_config.validate()
        assert request_id not in self.handles
        self.prompts.append(input_ids.data[0].tolist())
        self.handles[request_id] = GenerationHandle(generation_config)
        return self.handles[request_id]

    def has_non_finished_requests(self):
        return bool(self.handles)

    def step(self):
        assert self.handles
        self.num_steps += 1
        for request_id, handle in list(self.handles.items()):
            handle.unread.append(SimpleNamespace(generated_ids=[7], score=0.0))
            handle.num_tokens += 1
            if handle.num_tokens == handle.config.max_new_tokens:
                del self.handles[request_id]
