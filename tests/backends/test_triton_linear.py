"""Linear layers with quantized weights, as a GPU runs them where there is one, else by Triton's interpreter.

Their kernel is also compiled for GPUs, and executed by docs/ptx.py. See test_triton.py.
"""

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock, Mock

import pytest
import torch

from nanoengine import LLM, EngineConfig
from tests import doubles
from tests.backends.test_kernels import quantized
from tests.backends.test_triton import DEVICE, INTERPRETED, compiles, interpreted, runs_kernels, stack_bytes
from tests.checkpoints.test_quantized_formats import CHECKPOINTS, check_equal, write, write_gguf
from tests.helpers import ask, checkpoint, hf_model, prompt_logprobs, random_prompts, slow, tokens_of
from tests.launches import TARGETS, Emulated, Recorder, compile_launch, obstacle

from nanoengine.backends import triton_linear as backend  # isort: skip  # test_triton skips without Triton

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
executed = pytest.mark.skipif(bool(obstacle()), reason=str(obstacle()))
# Outputs, inputs, bits, group, zeros; 96 inputs of 4 bits fill one and a half pairs of tiles.
ODD, WIDE, BYTES = (70, 96, 4, 32, True), (33, 256, 4, 128, False), (65, 128, 8, 128, True)
SMALL_GROUPS, LONG, BYTES_OF_32 = (20, 48, 4, 16, True), (16, 1280, 4, 64, True), (70, 96, 8, 32, False)
SHAPES = ODD, WIDE, BYTES, SMALL_GROUPS, LONG, BYTES_OF_32


def check_product(num_tokens, shape, dtype, has_bias=True, device="cpu"):
    """Compare a layer's outputs with the products of its dequantized weight, in double precision."""
    torch.manual_seed(0)
    weight = quantized(*shape)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, shape[1]).to(dtype)
    plain = weight.dequantize(dtype)
    expected = x.double() @ plain.double().T + (0 if bias is None else bias.double())
    where = torch.device(device)
    layer = backend.TritonLinear(weight, None if bias is None else bias.to(where), dtype, where)
    assert torch.equal(layer.weight.cpu(), plain)
    out = layer(x.to(where)).cpu()
    assert out.dtype == dtype
    rounding = 1e-6 if dtype == FULL else torch.finfo(dtype).eps
    if INTERPRETED and dtype == BRAIN:
        rounding *= 2  # Triton's interpreter cuts off the bits that bfloat16 lacks
    assert (out.double() - expected).abs().max() <= rounding * expected.abs().max()


CASES = [("sm80", 3, ODD, BRAIN), ("sm80", 17, WIDE, HALF)]
CASES += [("sm90", 2, LONG, BRAIN), ("sm90", 70, BYTES, BRAIN)]
SLOW_CASES = [
    *itertools.product(("sm80", "sm89", "sm90"), (1, 16, 130), SHAPES, (HALF, BRAIN)),
    *itertools.product(["sm75"], (1, 16, 130), SHAPES, [HALF]),
    *itertools.product(["sm80"], (1, 17), (ODD, BYTES, LONG), [FULL]),
]


@executed
@pytest.mark.parametrize(("generation", "num_tokens", "shape", "dtype"), [*CASES, *slow(*SLOW_CASES)])
def test_what_triton_compiles_for_a_gpu_equals_the_dequantized_product(
    generation, num_tokens, shape, dtype, monkeypatch
):
    monkeypatch.setattr(backend, "_linear_kernel", Emulated(backend._linear_kernel, generation))
    monkeypatch.setattr(backend, "generation", lambda device: generation)
    unwritten = functools.partial(torch.full, fill_value=torch.nan)  # memory, until a kernel writes to it
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: unwritten(shape, **kwargs))
    check_product(num_tokens, shape, dtype)


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),  # tiles of float32 have 16 tokens
    [*itertools.product((0, 1, 17, 130), (HALF, BRAIN)), *itertools.product((0, 1, 17), [FULL])],
)
def test_any_layer_and_number_of_tokens_equals_the_dequantized_product(num_tokens, shape, dtype):
    if num_tokens:
        check_product(num_tokens, shape, dtype, has_bias=num_tokens % 2 == 0, device=DEVICE)
    layer = backend.TritonLinear(quantized(*shape), None, dtype, torch.device(DEVICE))
    x = torch.randn(2, -(-num_tokens // 2), 2 * shape[1], device=DEVICE).to(dtype)[..., : shape[1]]
    out = layer(x)  # rows that lie apart
    assert out.shape == (*x.shape[:2], shape[0])
    assert torch.equal(out, layer(x.contiguous()))


@compiles
def test_layers_compile_few_kernels_for_any_number_of_tokens(monkeypatch):
    """A request must not wait for the compiler because nobody has sent as many tokens before."""
    recorder = Recorder(backend._linear_kernel)
    monkeypatch.setattr(backend, "_linear_kernel", recorder)
    monkeypatch.setattr(backend, "generation", lambda device: "sm90")
    for shape in ((1024, 2048), (512, 1024)):
        layer = backend.TritonLinear(quantized(*shape, 4, 32, False), None, BRAIN, torch.device("cpu"))
        for num_tokens in (1, 2, 16, 17, 100, *range(129, 4100, 128)):
            layer(torch.zeros(num_tokens, shape[1], dtype=BRAIN))
    params = [param for param in recorder.kernel.params if param.is_constexpr or not param.do_not_specialize]

    def kind(named, options):
        """Return what Triton compiles a kernel for: of an integer, whether it is 1 or a multiple of 16."""
        values = ((param.is_constexpr, named[param.name]) for param in params)
        kept = (x if fixed else (x == 1, x % 16 == 0) for fixed, x in values if isinstance(x, int))
        return named["out"].dtype, *kept, *options.values()

    assert len({kind(named, options) for named, options, _ in recorder.launches}) <= 3


@pytest.mark.parametrize("shape", [ODD, WIDE, BYTES, SMALL_GROUPS, BYTES_OF_32])
def test_rows_and_bytes_are_those_of_the_quantized_weight(shape):
    num_outputs, num_inputs, bits, group, has_zeros = shape
    weight = quantized(*shape)
    layer = backend.TritonLinear(weight, None, BRAIN, torch.device("cpu"))
    rows = torch.tensor([[3, 0], [num_outputs - 1, 3]])
    assert torch.equal(layer.rows(rows), weight.dequantize(BRAIN)[rows])
    assert layer.rows(rows[:0]).shape == (0, 2, num_inputs)  # an embedding's, for its dtype
    padded = -(-num_inputs // (2 * layer.step)) * 2 * layer.step if bits == 4 else num_inputs
    scales = num_outputs * num_inputs // group * 2 * (1 + has_zeros)
    assert sum(x.nbytes for x in layer.buffers()) == num_outputs * padded * bits // 8 + scales


ON_A_GPU = {"attn_backend": "triton", "block_size": 16, "max_num_seqs": 2, "max_model_len": 48}


@interpreted
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("awq", {"dtype": "bfloat16"}),
        ("gptq in 8 bits", {"dtype": "bfloat16", "model_impl": "transformers"}),
        *slow(("gptq", {}), ("compressed, int8", {"dtype": "bfloat16"})),
    ],
)
def test_weights_stay_quantized_on_a_gpu(name, settings, flash_doubles, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # Triton's interpreter needs it
    stated, writer, bits = CHECKPOINTS[name]
    model = write(tmp_path, stated, writer)
    assert check_equal(model, tmp_path, **ON_A_GPU, **settings) == {bits}
    assert f"weights in {bits} bits on cpu" in caplog.text
    assert "dequantized" not in caplog.text
    assert flash_doubles["replay"] > 0  # in CUDA graphs, for all that the kernel knows


def rounded(path, **settings):
    """Return tokens, log-probabilities, the quantized layers by name, and the first line."""
    with LLM(path, **{"num_kv_blocks": 20, "max_num_seqs": 2, "max_model_len": 64, **settings}) as llm:
        outputs = ask(llm, random_prompts([9, 17]), max_tokens=6, prompt_logprobs=0)
        modules = llm.llm_engine.runner.model.named_modules()
        layers = ((name.replace(".layer.", "."), x) for name, x in modules if getattr(x, "form", (0,))[0])
        held = {name: (x.form.bits, x.form.group, x.weight) for name, x in layers}
        line = llm.llm_engine.describe()
    logprobs = torch.tensor([x for out in outputs for x in prompt_logprobs(out)])
    return tokens_of(outputs), logprobs, held, line


TIED, NAMES = "qwen3 tied, one kv head", ("llama odd sizes", "gpt2", "mixtral", "gemma3", "qwen3")
BY_DEFAULT = [(TIED, "int4"), (TIED, "int8"), *zip(NAMES, ["int8", "int4"] * 3, strict=False)]
IN_THE_OTHER_FORM = [*zip(NAMES, ["int4", "int8"] * 3, strict=False)]


@pytest.mark.parametrize(("name", "form"), [*BY_DEFAULT, *slow(*IN_THE_OTHER_FORM)])
def test_weights_rounded_at_load_are_those_of_a_cpu(name, form, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # Triton's interpreter needs it
    path, settings = checkpoint(name, tmp_path_factory)[0], {"dtype": "float32", "quantization": form}
    on_cpu, logprobs, layers, line = rounded(path, **settings)
    doubles.install(monkeypatch)
    if INTERPRETED:
        if name != TIED:
            pytest.skip("it takes minutes")
        settings |= ON_A_GPU
    else:
        doubles.install_linear(monkeypatch)
    on_gpu, their_logprobs, their_layers, their_line = rounded(path, **settings)
    assert their_layers.keys() == layers.keys()
    assert all((x[0] == 8) == (form == "int8" or "lm_head" in place) for place, x in layers.items())
    for place, (bits, group, weight) in their_layers.items():
        assert (bits, group) == layers[place][:2], place
        assert torch.equal(weight, layers[place][2]), place
    assert on_gpu == on_cpu
    assert their_logprobs == pytest.approx(logprobs, abs=2e-4)
    assert all(f"float32 with {form} weights on cpu" in text for text in (line, their_line))


def test_a_quantized_embedding_of_a_gguf_file_is_read_from_the_head(in_float32, monkeypatch, tmp_path):
    doubles.install_linear(monkeypatch)
    path = tmp_path / "model.gguf"
    model = write_gguf(path, hf_model("qwen3 tied, one kv head"), "Q8_0", "qwen3", tied=True)
    assert check_equal(model, path, max_num_seqs=2) == {8}


def test_weights_are_not_rounded_at_load_if_nothing_could_multiply_them(flash_doubles, monkeypatch):
    with pytest.raises(ValueError, match="quantization='int4' cannot be used: enforce_eager"):
        LLM("demo", quantization="int4", enforce_eager=True)
    monkeypatch.setattr(backend, "try_out", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="'int8' cannot be used: triton_linear failed when tried"):
        LLM("demo", quantization="int8")


@pytest.mark.parametrize("settings", [{}, {"model_impl": "transformers"}])
def test_too_little_memory_for_integers_is_an_error(settings, flash_doubles, monkeypatch, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(backend, "TritonLinear", Mock(side_effect=error))
    no_room = "no room on cpu for the weights"
    with pytest.raises(ValueError, match=f"{no_room}, rounded to 4 bits: CUDA out of mem"):
        LLM("demo", quantization="int4", **settings)
    write(tmp_path, *CHECKPOINTS["awq"][:2])
    with pytest.raises(ValueError, match=rf"{no_room}: they take 0\.0 GiB if dequantized"):
        LLM(str(tmp_path), **settings)


def line_of(weight):
    """Return what a GPU makes of a weight, and its notes for the user."""
    gpu = doubles.FakeGPU(torch.device("cpu"), EngineConfig(model="demo"))
    return [gpu.pack(weight, None, BRAIN) for _ in range(2)], gpu.notes


def test_what_cannot_stay_quantized_is_in_the_first_line(flash_doubles, tmp_path, caplog, monkeypatch):
    reason = "weights dequantized: groups of 20 inputs, or scales that float16 cannot hold"
    assert line_of(quantized(16, 40, 4, 20, False)) == ([None, None], [reason])
    monkeypatch.setattr(backend, "_linear_kernel", idle := MagicMock())
    idle.__getitem__.return_value = lambda out, *args, **kwargs: out.fill_(0)
    backend._try_out.cache_clear()
    reason = "weights dequantized: triton_linear failed when tried: RuntimeError: it computed wrong results"
    assert line_of(quantized(*ODD)) == ([None, None], [reason])
    write(tmp_path, *CHECKPOINTS["awq"][:2])
    with LLM(str(tmp_path), num_kv_blocks=40, max_num_seqs=2, dtype="bfloat16") as llm:
        assert ask(llm, [[1]])
    assert f"({reason})" in caplog.messages[-1]
    assert "awq weights, dequantized," in caplog.messages[-1]


@runs_kernels
def test_a_kernel_that_works_is_used(flash_doubles):
    backend._try_out.cache_clear()
    for shape in (ODD, BYTES):
        backend.try_out(backend.Form(shape[2], shape[3], int(shape[4])), BRAIN, torch.device(DEVICE))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "dtype", "num_tokens", "bits"),
    [
        *(("sm90", BRAIN, 100, 4), ("sm80", BRAIN, 1, 4), ("sm80", BRAIN, 100, 4)),
        *itertools.product(TARGETS, (HALF, FULL), (1, 100), (4, 8)),
    ],
)
def test_a_kernel_uses_tensor_cores_and_no_stack(generation, dtype, num_tokens, bits, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled, not found
    kernel = backend._linear_kernel
    monkeypatch.setattr(backend, "_linear_kernel", recorder := Recorder(kernel))
    monkeypatch.setattr(backend, "generation", lambda device: generation)
    for group in (32, 128):
        weight, bias = quantized(4096, 1024, bits, group, True), torch.zeros(4096, dtype=dtype)
        layer = backend.TritonLinear(weight, bias, dtype, torch.device("cpu"))
        layer(torch.zeros(num_tokens, 1024, dtype=dtype))
        named, options, grid = recorder.launches[-1]
        compiled = compile_launch(kernel, named, options, generation)
        assert grid[0] * grid[1] * grid[2] <= backend.MAX_PROGRAMS or grid[2] == 1
        assert compiled.metadata.shared <= TARGETS[generation][1]
        assert stack_bytes(compiled, tmp_path / "kernel.cubin") == 0
        if dtype != FULL and generation != "sm75":
            code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            names = {"gfx942": "mfma", "sm90": "wgmma" if num_tokens > 16 else "mma.sync"}
            assert names.get(generation, "mma.sync") in code


def test_threads_that_pack_weights_wait_for_the_first_trial_of_a_kernel(monkeypatch):
    calls = []

    def forward(self, x):
        calls.append(len(x))
        time.sleep(0.05)
        return torch.nn.functional.linear(x, self.weight)

    monkeypatch.setattr(backend.TritonLinear, "forward", forward)
    backend._try_out.cache_clear()
    arguments = backend.Form(8, 32), torch.float32, torch.device("cpu")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: backend.try_out(*arguments), range(4))) == [None] * 4
    backend._try_out.cache_clear()
    assert calls == [1, 17]
