"""Datasets of prompts on many machines: an engine for `ray.data.Dataset.map_batches`. Needs the extra `ray`.

Ray places an engine on each GPU or group of cores and distributes the batches. If an engine dies, Ray starts
it again and gives its batch to another engine. docs/guide/machines.md shows how to run it.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

try:
    import pyarrow as pa
except ModuleNotFoundError:
    message = "nanoengine.ray needs Ray Data: pip install 'nanoengine[ray]'"
    raise ModuleNotFoundError(message, name="pyarrow") from None

from nanoengine.llm import LLM
from nanoengine.sampling_params import RequestOutputKind, SamplingParams
from nanoengine.signals import uninterrupted

Row = Mapping[str, Any]
# The columns added to a row. In a failed row all but `error` are null. The first two are `ray.data.llm`'s.
ANSWER = pa.schema(
    {
        "generated_text": pa.string(),
        "generated_tokens": pa.list_(pa.int64()),
        "finish_reason": pa.string(),
        "num_cached_tokens": pa.int64(),  # prompt tokens taken from the prefix cache
        "error": pa.string(),  # why the row failed, else null
    }
)


class Predictor:
    """Completes prompts: a callable class for `map_batches(Predictor, batch_format="pyarrow", ...)`.

    A row keeps its columns and its place, and gets the columns of `ANSWER`. If a row cannot be served, its
    `error` has the reason, and the other rows get their answers. A batch is queued in the order of its
    prompts, so that equal prefixes hit the prefix cache. `Dataset.sort` brings such rows into one batch.

    Args:
        model: a hub id, or a directory that exists on every machine.
        sampling_params: for all rows, or a function of a row (with a `seed` from a key, the sampled answer
            does not depend on the engine that computes it); None: the checkpoint's defaults.
        column: the column of prompts: strings, lists of token ids, or conversations for the chat template.
        settings: fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | Callable[[Row], SamplingParams] | None = None,
        *,
        column: str = "prompt",
        **settings: Any,
    ) -> None:
        self.llm, self.column = LLM(model, **settings), column
        self.sampling_params = sampling_params or self.llm.get_default_sampling_params()

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Complete a batch. If no row could be computed, raise the error of the step."""
        if not isinstance(batch, pa.Table):
            raise TypeError(f'map_batches needs batch_format="pyarrow", got a batch of type {type(batch)}')
        if taken := set(ANSWER.names).intersection(batch.column_names):
            raise ValueError(f"the rows have columns {sorted(taken)} already; rename or drop them")
        answers = self.answer(batch.to_pylist())
        for item in ANSWER:
            batch = batch.append_column(item, pa.array([one.get(item.name) for one in answers], item.type))
        return batch

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the fields of `ANSWER` for each row. Missing fields are null."""
        answers: list[dict[str, Any]] = [{} for _ in rows]
        for index in sorted(range(len(rows)), key=lambda index: str(rows[index].get(self.column))):
            with uninterrupted():
                try:
                    self.add(str(index), rows[index])
                except Exception as error:  # user functions and chat templates may raise any exception
                    answers[index]["error"] = f"{type(error).__name__}: {error}"
        failure: Exception | None = None
        while self.llm.has_unfinished_requests():
            with uninterrupted():
                try:
                    outputs = self.llm.step()
                except Exception as error:
                    logging.getLogger(__name__).exception("a step failed and is computed again")
                    failure = error
                    continue
            for output in outputs:
                answer, [completion] = answers[int(output.request_id)], output.outputs
                if completion.finish_reason == "error":
                    answer["error"] = f"the engine failed: {failure or completion.stop_reason}"
                    continue
                answer["generated_text"] = completion.text
                answer["generated_tokens"] = completion.token_ids
                answer["finish_reason"] = completion.finish_reason
                answer["num_cached_tokens"] = output.num_cached_tokens
        if failure is not None and not any("finish_reason" in answer for answer in answers):
            raise failure
        return answers

    def add(self, request_id: str, row: Row) -> None:
        """Queue a row. Raises an exception if the row cannot be served."""
        prompt, params = row[self.column], self.sampling_params
        params = (params if isinstance(params, SamplingParams) else params(row)).clone()
        if params.n != 1 or params.logprobs is not None or params.prompt_logprobs is not None:
            raise ValueError("n must be 1 and logprobs None: a row has room for the tokens of one answer")
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            [prompt] = self.llm.render_chat([prompt])
        self.llm.add_request(request_id, prompt, params)
