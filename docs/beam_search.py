"""Beam search on top of `LLM.generate`: an engine does not need it built in, because users can write it.

At each step the most probable continuations of all beams compete for `num_beams` places. A beam that ends
gives up its place, and competes with the other ended beams by log-probability per token. The prefix cache
holds each beam's full blocks, so a step computes only the tokens after them.

The rules are those of `generate(num_beams=...)` in transformers, and the tokens found are the same.
"""

from nanoengine import LLM, SamplingParams


def beam_search(llm: LLM, prompt: list[int], num_beams: int, max_tokens: int) -> list[list[int]]:
    """Return the best outputs found, as token ids, the best first."""
    ends = llm.llm_engine.checkpoint.eos_token_ids
    # Each beam can end in every way and still leave enough continuations for `num_beams` running beams.
    num_candidates = min(max(2, 1 + len(ends)) * num_beams, llm.llm_engine.checkpoint.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_candidates, ignore_eos=True)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]  # sum of log-probabilities, tokens
    ended: list[tuple[float, list[int]]] = []  # log-probability per token, tokens
    for length in range(1, max_tokens + 1):
        outputs = llm.generate([prompt + tokens for _, tokens in beams], params, use_tqdm=False)
        found = []
        for (total, tokens), output in zip(beams, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            found += [(total + one.logprob, [*tokens, token]) for token, one in logprobs[0].items()]
        best = sorted(found, reverse=True)[:num_candidates]
        is_last = length == max_tokens
        ended += [
            (total / length, tokens) for total, tokens in best[:num_beams] if is_last or tokens[-1] in ends
        ]
        ended = sorted(ended, reverse=True)[:num_beams]
        beams = [beam for beam in best if beam[1][-1] not in ends][:num_beams]
        if len(ended) == num_beams and ended[-1][0] >= beams[0][0] / length:
            break  # no running beam is better than the worst ended one
    return [tokens for _, tokens in ended]
