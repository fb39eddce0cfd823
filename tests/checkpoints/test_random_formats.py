"""Random small models whose tensors are saved in random types, against transformers with the same weights.

pytest runs 40 cases, and 200 slow ones, a few on two ranks. To run more: `CASES=2000 pytest -n auto -m slow`
with this file. A failure prints the case's settings.
"""

import math
import os
import random
import tempfile
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM
from tests.checkpoints import test_quantized_formats as formats
from tests.helpers import TINY, ask, edit_config, logprobs_of, random_prompts, slow, with_random_norms

NUM_CASES = int(os.environ.get("CASES", 240))
FAMILIES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}  # their names in GGUF
KINDS = [*formats.KINDS, *(kind for kind in formats.HALVES if kind not in formats.KINDS), "TQ1_0", "TQ2_0"]
CONTAINERS = "gguf", "gptq", "awq", "packed", "int8", "float8", "4 bits", "8 bits of bitsandbytes", "fp8"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCALES = "scales", "weight_scale", "weight_scale_inv", "SCB", "weight.quant_map"  # factors of the weights


class Case:
    """A random model, a checkpoint of it and perhaps an adapter, all made from a seed."""

    def __init__(self, seed, path, ranks=1):
        self.rng, self.ranks = random.Random(seed), ranks
        torch.manual_seed(seed)
        self.container = self.rng.choice(CONTAINERS)
        self.dtype = self.rng.choice(["float32", "float32", "bfloat16"])
        self.impl = "nanoengine" if ranks > 1 else self.rng.choice(["nanoengine", "transformers"])
        self.family = self.rng.choice(list(FAMILIES))
        self.model = self._make_model()
        self.config, self.kinds, self.settings, self.lora = self.model.config, {}, None, None
        self.held = {EMBEDDING, HEAD}
        if self.config.tie_word_embeddings:
            choices = [{EMBEDDING}, {HEAD}, {EMBEDDING, HEAD}]
            self.held = choices[0] if self.container == "gguf" else self.rng.choice(choices)
        with torch.no_grad():
            write = self._write_gguf if self.container == "gguf" else self._write
            self.checkpoint = write(path)
        if ranks == 1 and self.rng.random() < 0.4:
            self.lora = path / "adapter"
            self.model = self._adapt()

    def __str__(self):
        """Return the case's settings."""
        sizes = {name: getattr(self.config, name, None) for name in [*TINY, "head_dim"]}
        how = f"{self.settings}, {self.dtype}, {self.impl}, {self.ranks} ranks, held {sorted(self.held)}"
        adapter = self.adapter if self.lora else None
        return f"{self.family} as {self.container} {how}, adapter {adapter}\n{sizes}\n{self.kinds}"

    def _make_model(self):
        rng, is_odd = self.rng, self.rng.random() < 0.3
        heads, kv_heads = rng.choice([(4, 2), (4, 2), (4, 4), (9, 3), (3, 1), (6, 3)])
        if self.ranks > 1:
            heads, kv_heads = rng.choice([(4, 2), (4, 4), (6, 2), (2, 1)])
        sizes = {"hidden_size": rng.choice([64, 96, 160]), "intermediate_size": rng.choice([96, 128, 160])}
        sizes |= {"vocab_size": 128, "head_dim": rng.choice([16, 32])}
        if is_odd:
            sizes = {"hidden_size": rng.choice([60, 90, 65]), "intermediate_size": rng.choice([97, 101, 100])}
            sizes |= {"vocab_size": rng.choice([131, 67]), "head_dim": rng.choice([22, 10])}
        elif self.container == "gguf" and rng.random() < 0.5:
            sizes |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
            heads, kv_heads = 4, 2
        if FAMILIES[self.family] == "llama":  # LlamaConfig asks for it
            sizes["hidden_size"] = heads * round(sizes["hidden_size"] / heads)
        settings = {**TINY, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        settings |= {"tie_word_embeddings": rng.random() < 0.5}
        settings |= {"initializer_range": 1.2 / math.sqrt(sizes["hidden_size"])}
        if self.family in ("Llama", "Qwen3"):
            settings["attention_bias"] = rng.random() < 0.5
        if self.family == "Llama":
            settings["mlp_bias"] = rng.random() < 0.5
        if self.family == "Mistral":
            settings["sliding_window"] = None if self.container == "gguf" else rng.choice([None, 8])
        config = getattr(transformers, f"{self.family}Config")(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        return with_random_norms(model)

    def _write_gguf(self, path):
        blocks = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] for kind in KINDS}
        for name, weight in self.model.state_dict().items():
            self.kinds[name] = self.rng.choice([one for one in KINDS if weight.shape[-1] % blocks[one] == 0])
        tied = self.config.tie_word_embeddings
        file, family = path / "model.gguf", FAMILIES[self.family]
        formats.write_gguf(file, self.model, self.kinds.__getitem__, family, tied=tied)
        return file

    def _write(self, path):
        """Write safetensors. The model's weights become those that the files stand for."""
        path = path / "model"
        if self.held == {EMBEDDING, HEAD}:
            head = self.model.lm_head.weight.clone()
            if self.config.tie_word_embeddings:  # by its config: the files hold a head of its own
                head.normal_(0, self.config.initializer_range)
            self.model.lm_head.weight = torch.nn.Parameter(head)
        self.settings, write = getattr(self, f"_{self.container.split()[-1]}")()
        ends = [f"{name}.weight" for name in (*PROJECTIONS, "lm_head")]
        if self.container in ("packed", "int8", "float8"):
            ends.append("embed_tokens.weight")
        tensors = {}
        for name, parameter in self.model.state_dict().items():
            if name in (EMBEDDING, HEAD) and name not in self.held:
                continue
            tensors[name] = parameter.clone()
            made = None
            if name.endswith(tuple(ends)) and self.rng.random() < 0.7:
                made = write(tuple(parameter.shape))
            if made is not None:
                parts, weight = made
                factor = 2.0 ** round(math.log2(1.2 / (weight.std() * math.sqrt(weight.shape[1]))))
                parts = {end: part * factor if end in SCALES else part for end, part in parts.items()}
                parameter.copy_(weight * factor)
                del tensors[name]
                tensors |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
                self.kinds[name] = {end: tuple(part.shape) for end, part in parts.items()}
        self.config.architectures = [type(self.model).__name__]
        self.config.save_pretrained(path)
        if self.kinds:
            edit_config(path, quantization_config=self.settings)
        save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
        return path

    # Each returns the config's settings of a format, and a function from a shape to the parts of a weight and
    # the weight they stand for, or to None if the format does not support the shape.

    def _gptq(self):
        bits, group = self.rng.choice([4, 8]), self._group()
        order = self.rng.choice(["none", "in turn", "scattered"])
        version = self.rng.choice(["gptq", "gptq_v2"])
        stated = {"quant_method": "gptq", "bits": bits, "group_size": group or -1}
        stated["checkpoint_format"] = version

        def write(shape):
            if any(size % (32 // bits) for size in shape):
                return None
            scattered = formats.scattered if order == "scattered" else None
            return formats.gptq(shape, bits, group or shape[1], version, scattered, order != "none")

        return {**stated, "desc_act": order == "scattered"}, write

    def _awq(self):
        group = self._group()
        stated = {"quant_method": "awq", "bits": 4, "group_size": group or -1}
        return stated, lambda shape: None if shape[0] % 8 else formats.awq(shape, group or shape[1])

    def _packed(self):
        bits, symmetric = self.rng.choice([4, 8]), self.rng.random() < 0.5
        if self.rng.random() < 0.2:
            stated = formats.compressed("pack-quantized", bits, {"strategy": "tensor"})
            return stated, lambda shape: formats.packed_whole(shape, bits, symmetric)
        make = partial(formats.packed, bits=bits, symmetric=symmetric)
        return self._groups("pack-quantized", bits, make)

    def _int8(self):
        form = self.rng.choice(["int-quantized", "naive-quantized"])
        return self._groups(form, 8, formats.int_quantized)

    def _groups(self, form, bits, make):
        """Return a format with one or two group sizes, one of which is chosen for each layer."""
        sizes = [self._group() for _ in range(self.rng.choice([1, 1, 2]))]
        all_of_them = []
        for size in sizes:
            strategy = {"strategy": "channel"} if size is None else formats.in_groups(size)
            stated = formats.compressed(form, bits, strategy)
            all_of_them += stated["config_groups"].values()
        stated["config_groups"] = {f"group_{i}": group for i, group in enumerate(all_of_them)}

        def write(shape):
            num_inputs, chosen = shape[1], self.rng.sample(sizes, len(sizes))
            size, *others = (min(size or num_inputs, num_inputs) for size in chosen)
            counts = [-(-num_inputs // other) for other in others if other != size]
            is_unclear = -(-num_inputs // size) in counts  # to which group its scales belong
            return None if is_unclear else make(shape, group=size)

        return stated, write

    def _float8(self):
        strategies = [({"strategy": "tensor"}, None), ({"strategy": "channel"}, (1, None))]
        strategies += [(formats.in_groups(48), (1, 48))]
        strategies += [({"strategy": "block", "block_structure": [40, 32]}, (40, 32))]
        strategy, block = self.rng.choice(strategies)
        stated = formats.compressed("float-quantized", 8, {**strategy, "type": "float"})
        return stated, lambda shape: formats.float_quantized(shape, block)

    def _fp8(self):
        block = self.rng.choice([None, (32, 32), (40, 24), (128, 128)])
        stated = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
        return stated, lambda shape: formats.float_quantized(shape, block, "weight_scale_inv")

    def _bits(self):
        nested, block = self.rng.random() < 0.5, self.rng.choice([64, 128, 256])
        kind = self.rng.choice(["nf4", "fp4"])
        stated = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}

        def write(shape):
            parts, weight = formats.nf4(shape, nested, block)
            return {end.replace("__nf4", f"__{kind}"): part for end, part in parts.items()}, weight

        return stated, write

    def _bitsandbytes(self):
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}, formats.int8_of_bitsandbytes

    def _group(self):
        return self.rng.choice([None, 16, 32, 32, 48, 64, 80, 128])

    def _adapt(self):
        rng, ends = self.rng, ["embed_tokens", "lm_head"]
        saved = rng.sample(ends, rng.choice([0, 0, 0, 1, 1, 2]))
        targets = [name for name in (*PROJECTIONS, *ends) if name not in saved and rng.random() < 0.3]
        self.adapter = {"target_modules": targets or ["q_proj"], "modules_to_save": saved or None}
        self.adapter |= {"r": rng.choice([1, 4]), "lora_alpha": rng.choice([2, 8])}
        self.adapter |= {"use_rslora": rng.random() < 0.3, "use_dora": rng.random() < 0.3}
        self.adapter["bias"] = rng.choice(["none", "all"])
        tuned = formats.adapter_of(self.model, self.lora, self.adapter, is_merged=False)
        if rng.random() < 0.5:  # PEFT saves the weights of adapted ends too, which are the base's
            file = self.lora / "adapter_model.safetensors"
            kept = {name: x for name, x in load_file(file).items() if not name.endswith("base_layer.weight")}
            save_file(kept, file)
        return tuned

    def check(self):
        """Compare log-probabilities of a prompt and of a few tokens after it with transformers'."""
        prompt = random_prompts([self.rng.randint(5, 24)], self.rng.random(), self.config.vocab_size)[0]
        settings = {"dtype": self.dtype, "model_impl": self.impl, "tensor_parallel_size": self.ranks}
        with LLM(str(self.checkpoint), num_kv_blocks=8, lora=self.lora, **settings) as llm:
            (output,) = ask(llm, prompt, max_tokens=3, prompt_logprobs=0, logprobs=0)
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        tokens = [*prompt, *output.outputs[0].token_ids]
        ours = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)])
        ends = range(len(tokens) - 1), tokens[1:]
        theirs, tolerance = logprobs_of(self.model, tokens)[ends], 2e-4
        if self.dtype == "bfloat16":
            rounded = logprobs_of(deepcopy(self.model).bfloat16(), tokens)[ends]
            # On some processors, products with integers also round the activations, to 8 bits
            tolerance = 0.02 + 3 * (rounded - theirs).square().mean().sqrt()
        difference = (ours - theirs).square().mean().sqrt()
        assert difference <= tolerance, f"logprobs differ by {difference:.3} > {tolerance:.3}: {self}"


@pytest.mark.parametrize("seed", [*range(10), *slow(*range(10, NUM_CASES))])
def test_random_checkpoint_computes_with_its_dequantized_weights(seed):
    with tempfile.TemporaryDirectory() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about tied weights
        Case(seed, Path(path), ranks=2 if seed % 50 == 49 else 1).check()  # two ranks take seconds
