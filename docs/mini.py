"""Lessons 1 to 3 in one file. From the repository's root: python docs/mini.py "What is 27 + 58?"."""

import sys
from itertools import accumulate

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

W = load_file("nanoengine/demo/model.safetensors")  # Qwen3: 4 layers, 4 query heads, 2 KV heads, head size 64
TOKENIZER = Tokenizer.from_file("nanoengine/demo/tokenizer.json")
STOP = TOKENIZER.token_to_id("<|im_end|>")


def ask(question):
    return TOKENIZER.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids


def norm(x, name):
    return F.rms_norm(x, x.shape[-1:], W[f"model.{name}.weight"], eps=1e-6)


def linear(x, name):
    return F.linear(x, W[f"model.{name}.weight"])


def rotate(x, angles):
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def model(token_ids, positions, attend):
    x = W["model.embed_tokens.weight"][token_ids]
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    angles = torch.outer(torch.tensor(positions).float(), frequencies).repeat(1, 2).unsqueeze(1)
    for i in range(4):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        q, k, v = (linear(h, f"{at}.{name}_proj").view(len(h), -1, 64) for name in "qkv")
        q, k = rotate(norm(q, f"{at}.q_norm"), angles), rotate(norm(k, f"{at}.k_norm"), angles)
        x = x + linear(attend(i, q, k, v).flatten(1), f"{at}.o_proj")
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (linear(h, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj")
    return linear(norm(x, "norm"), "embed_tokens")


def attention(q, k, v):
    sees = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)[0].transpose(0, 1)


def generate(prompt, model=model):
    tokens = list(prompt)
    while tokens[-1] != STOP:
        logits = model(tokens, range(len(tokens)), lambda layer, q, k, v: attention(q, k, v))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def generate_cached(prompt, model=model):
    tokens, num_computed, cache = list(prompt), 0, {}

    def attend(layer, q, k, v):
        if layer in cache:
            k, v = torch.cat((cache[layer][0], k)), torch.cat((cache[layer][1], v))
        cache[layer] = k, v
        return attention(q, k, v)

    while tokens[-1] != STOP:
        logits = model(tokens[num_computed:], range(num_computed, len(tokens)), attend)
        num_computed = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


class Sequence:
    def __init__(self, prompt):
        self.tokens, self.num_computed, self.block_table = list(prompt), 0, []


class Engine:
    def __init__(self, num_blocks, block_size):
        self.k, self.v = torch.zeros(2, 4, num_blocks * block_size, 2, 64)
        self.block_size, self.free_blocks = block_size, list(range(num_blocks))

    def slot(self, seq, position):
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def step(self, seqs):
        chunks = [range(seq.num_computed, len(seq.tokens)) for seq in seqs]
        for seq in seqs:
            while len(seq.block_table) * self.block_size < len(seq.tokens):
                seq.block_table.append(self.free_blocks.pop(0))

        def attend(layer, q, k, v):
            outs, end = [], 0
            for seq, chunk in zip(seqs, chunks, strict=True):
                slots = [self.slot(seq, position) for position in range(chunk.stop)]
                start, end = end, end + len(chunk)
                self.k[layer, slots[chunk.start :]] = k[start:end]
                self.v[layer, slots[chunk.start :]] = v[start:end]
                outs.append(attention(q[start:end], self.k[layer, slots], self.v[layer, slots]))
            return torch.cat(outs)

        token_ids = [token for seq in seqs for token in seq.tokens[seq.num_computed :]]
        logits = model(token_ids, [position for chunk in chunks for position in chunk], attend)
        for seq, row in zip(seqs, accumulate(map(len, chunks)), strict=True):
            seq.num_computed = len(seq.tokens)
            seq.tokens.append(int(logits[row - 1].argmax()))

    def generate(self, prompts):
        seqs = [Sequence(prompt) for prompt in prompts]
        while running := [seq for seq in seqs if seq.tokens[-1] != STOP]:
            self.step(running)
        return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]


if __name__ == "__main__":
    for answer in Engine(num_blocks=64, block_size=16).generate([ask(question) for question in sys.argv[1:]]):
        print(TOKENIZER.decode(answer))
