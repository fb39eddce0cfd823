r"""Builds tokenizers from GGUF files.

A file with byte-level tokens names its pre-tokenizer, and llama.cpp has regular expressions for each name.
It approximates some of them, and quotes the originals of tokenizer.json in comments. TABLE has the originals.
Source: llama.cpp's src/llama-vocab.cpp and src/unicode.cpp.
"""

import logging
import re
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nanoengine.checkpoints.gguf import CONTROL, UNKNOWN, USER_DEFINED, GGUFFile

SPACE = "\u2581"  # in place of a space
MAX_TOKEN_LENGTH = 4096  # the time for a token grows with its square
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"  # at the start of a word: one character before its letters
WORD = START + r"\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}"
MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
MARKED += r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
HANGUL_OR_MARKS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{HAN_AND_KANA}"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CASED_LETTERS = (  # without letters that were added to Unicode later
    "A-Za-z\u00b5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _by_case(end: str = "", but: str = "") -> str:
    """Return an expression for a word, or its part up to where the case changes from lower to upper."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return f"{START}{upper}*{lower}+{end}|{START}{upper}+{lower}*{end}"


CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT4O = rf"{_by_case(f'{CONTRACTION}?')}|\p{{N}}{{1,3}}|{CASED_SYMBOLS}|{SPACES}"
NOT_HAN = _by_case(f"{CONTRACTION}?", r"&&[^\p{Han}]")
LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
# Names of pre-tokenizers -> expressions. Each splits the pieces that the one before it leaves.
TABLE: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling": (GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    f"{LLAMA3_NAMES} dbrx smaug-bpe chatglm-bpe glm4 glm5": (LLAMA3,),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (QWEN2,),
    "qwen35": (
        rf"{CONTRACTION}|{START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
    ),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "ufakzeka": (rf"{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{CONTRACTION}|{WORD}|\p{{N}}+|{SYMBOLS}|{SPACES}"),
    "seed-coder": (rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",),
    "bailingmoe bailingmoe2 llada-moe": (
        rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|\p{{N}}|{SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        rf"{CONTRACTION}|{START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{1 << i}}}(?!\S)" for i in range(9, 1, -1))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "tekken": (rf"{_by_case()}|\p{{N}}|{CASED_SYMBOLS}|{SPACES}",),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (GPT4O,),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "youtu": (HANGUL_OR_MARKS, rf"{_by_case(f'{CONTRACTION}?')}|\p{{N}}|{CASED_SYMBOLS}|{SPACES}"),
    "kimi-k2": (rf"\p{{Han}}+|{NOT_HAN}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}",),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        EAST_ASIAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", HAN_AND_KANA, rf"{MARKED}[\r\n]*|{SPACES}"),
    "spark2_5": (r"\p{N}{1,3}", HAN_AND_KANA, rf"{MARKED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    "afmoe": (r"\p{N}+", r"\p{N}{1,3}(?=(?:\p{N}{3})*\z)", ASIAN, rf"{MARKED}[\r\n]*|{SPACES}"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ),
    "poro-chat bloom gpt3-finnish": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
}
SPLITS = {name: expressions for names, expressions in TABLE.items() for name in names.split()}
# A piece that is a token as a whole is not merged from its bytes.
IGNORE_MERGES = {*f"{LLAMA3_NAMES} minicpm5 youtu glm4 glm5 tekken granite-embed-multi-97m".split()}
ADD_BOS = {*LLAMA3_NAMES.split(), "tekken", "chameleon"}  # if the file does not say
# These pre-tokenizers replace spaces and do not spell out bytes.
NOT_BYTE_LEVEL = {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"}


def pre_tokenizer(name: str) -> Any:
    """Build the pre-tokenizer that llama.cpp calls by that name."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[name]]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


def byte_level(file: GGUFFile, tokens: list[str], vocab: dict[str, int]) -> Tokenizer:
    """Build a tokenizer whose tokens are bytes in GPT-2's spelling."""
    name = str(file.fields.get("tokenizer.ggml.pre"))
    if name in NOT_BYTE_LEVEL:
        raise ValueError(f"its pre-tokenizer {name!r} is not supported")
    if name not in SPLITS:
        message = "%s: the pre-tokenizer %r is unknown, so tokens may be wrong; give tokenizer=..."
        logging.getLogger(__name__).warning(message, file.path, name)
        name = "default"
    backend = Tokenizer(BPE(vocab, _merges(file), ignore_merges=name in IGNORE_MERGES))
    backend.pre_tokenizer = pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(file: GGUFFile, tokens: list[str], vocab: dict[str, int]) -> Tokenizer:
    """Build a tokenizer whose tokens have visible spaces. Characters without a token become bytes."""
    has_merges = file.fields["tokenizer.ggml.model"] == "gemma4"
    merges = _merges(file) if has_merges else _merges_by_score(file, tokens, vocab)
    unknown = tokens[min(file.token_id("unknown") or 0, len(tokens) - 1)]
    backend = Tokenizer(BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.fields.get("tokenizer.ggml.add_space_prefix", not has_merges):
        steps, parts = [normalizers.Prepend(SPACE), *steps], [*parts, decoders.Strip(" ", 1, 0)]
    backend.normalizer, backend.decoder = normalizers.Sequence(steps), decoders.Sequence(parts)
    if has_merges:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return backend


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge[1:].partition(" ")  # as in llama.cpp, a space may be the first character
        merges.append((merge[:1] + left, right))
    return merges


def _numbers(file: GGUFFile, name: str, num_tokens: int) -> np.ndarray:
    found = file.fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, np.ndarray) or len(found) != num_tokens:
        raise ValueError(f"tokenizer.ggml.{name} must be an array with a number for each token")
    return found


def _merges_by_score(file: GGUFFile, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return each way to merge two tokens into one, the highest score first."""
    scores = _numbers(file, "scores", len(tokens))
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_LENGTH:
        raise ValueError(f"a token is longer than {MAX_TOKEN_LENGTH} characters")
    order = np.argsort(-scores.astype(np.float64), kind="stable").tolist()
    return [
        (token[:i], token[i:])
        for token in (tokens[i] for i in order)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]


# tokenizer.ggml.model -> what builds the tokenizer, and the ids of BOS and EOS where the file has none
BUILDERS = {
    "gpt2": (byte_level, {}),
    "llama": (sentence_piece, {"bos": 1, "eos": 2}),
    "gemma4": (sentence_piece, {}),
}


def _load(file: GGUFFile) -> Any:
    fields, model = file.fields, file.fields.get("tokenizer.ggml.model")
    if model not in BUILDERS:
        raise ValueError(f"its tokenizer.ggml.model {model!r} is not one of {', '.join(BUILDERS)}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(file.strings("tokenizer.ggml.tokens"))]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"{len(tokens) - len(vocab)} of its tokens are duplicates")
    build, defaults = BUILDERS[model]
    try:
        backend = build(file, tokens, vocab)
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"its merges do not fit its tokens: {error}") from error
    types = _numbers(file, "token_type", len(tokens))
    # llama.cpp knows by the name, too, that special tokens take the spaces after them.
    strips = re.search("phi-?3", str(fields.get("general.name")), re.IGNORECASE) is not None
    added_tokens = []  # added at once: one by one takes a time that is quadratic in their number
    for i in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))):
        rstrip = strips and tokens[i] not in ("<unk>", "<s>", "<|endoftext|>")
        special = bool(types[i] != USER_DEFINED)
        added_tokens.append(AddedToken(tokens[i], normalized=False, special=special, rstrip=rstrip))
    backend.add_tokens(added_tokens)
    special_tokens = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.token_id(theirs)
        token_id = defaults.get(theirs) if token_id is None else token_id
        if token_id is not None and 0 <= token_id < len(tokens):
            special_tokens[f"{ours}_token"] = tokens[token_id]
    added = {}
    adds_bos = model == "llama" or fields.get("tokenizer.ggml.pre") in ADD_BOS
    for end, default in (("bos", adds_bos), ("eos", False)):
        # llama.cpp adds Gemma 4's BOS also where the file says otherwise.
        is_added = fields.get(f"tokenizer.ggml.add_{end}_token", default) or (model, end) == ("gemma4", "bos")
        token = special_tokens.get(f"{end}_token")
        added[end] = [token] if is_added and token is not None else []
    single, second = ([*added["bos"], f"${text}", *added["eos"]] for text in "AB")
    ids = {(token, vocab[token]) for token in added["bos"] + added["eos"]}
    backend.post_processor = TemplateProcessing(single=single, pair=single + second, special_tokens=[*ids])
    template = fields.get("tokenizer.chat_template")
    tokenizer_class: Any = PreTrainedTokenizerFast  # its __init__ is untyped
    return tokenizer_class(
        tokenizer_object=backend,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def load_gguf_tokenizer(file: GGUFFile) -> Any:
    """Return the tokenizer of a GGUF file, or None if the file has none."""
    if not file.num_tokens:
        return None
    try:
        return _load(file)
    except Exception as error:
        message = f"the tokenizer in {file.path} cannot be used: {error}; give tokenizer=..."
        raise ValueError(message) from error
