"""Datasets of prompts on many machines: an engine for `ray.data.Dataset.map_batches`, with the extra `ray`.

Ray places an engine on each GPU or group of cores, hands batches out, and starts a dead engine anew; a batch
that it was computing goes to another. docs/guide/machines.md has the lines to run it.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from nanoengine.llm import LLM
from nanoengine.sampling_params import RequestOutputKind, SamplingParams

Row = Mapping[str, Any]
# What is added to a row; null where it failed, but for the last. The first two are `ray.data.llm`'s names.
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

    A row keeps its columns and its place and gets those of `ANSWER`. One that cannot be served gets the
    reason as its `error`, and the others their answers. A batch is queued in the order of its prompts, so
    that those which begin alike meet in the prefix cache; `Dataset.sort` brings such rows into one batch.

    Args:
        model: a hub id, or a directory that every machine has.
        sampling_params: for all rows, or a function of a row (with `seed` from a key, a drawn answer does not
            depend on who computes it); None is what the checkpoint recommends.
        column: the prompts': strings, lists of token ids, or conversations for the chat template.
        settings: `EngineConfig`'s.

    Raises:
        TypeError, ValueError: as `LLM`.
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
        """Complete a batch.

        Raises:
            TypeError: it is not a table of pyarrow.
            ValueError: a column of `ANSWER` is there already.
            Exception: whatever a step raised, where none of the rows could be computed: the engine is broken
                rather than a row.
        """
        if not isinstance(batch, pa.Table):
            raise TypeError(f'map_batches needs batch_format="pyarrow", got a batch of type {type(batch)}')
        if taken := set(ANSWER.names).intersection(batch.column_names):
            raise ValueError(f"the rows have columns {sorted(taken)} already; rename or drop them")
        rows = batch.to_pylist()
        answers = self.answer(rows)
        columns = [pa.array([one.get(item.name) for one in answers], item.type) for item in ANSWER]
        return pa.Table.from_arrays(
            [*batch.columns, *columns], schema=pa.schema([*batch.schema, *ANSWER], batch.schema.metadata)
        )

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The fields of `ANSWER` for each row; those that are left out are null."""
        answers: list[dict[str, Any]] = [{} for _ in rows]
        for index in sorted(range(len(rows)), key=lambda index: str(rows[index].get(self.column))):
            try:
                self.add(str(index), rows[index])
            except Exception as error:  # a function of the user's, or a chat template, may raise anything
                answers[index]["error"] = f"{type(error).__name__}: {error}"
        failure: Exception | None = None
        while self.llm.has_unfinished_requests():
            try:
                outputs = self.llm.step()
            except Exception as error:
                logging.getLogger(__name__).exception("a step failed and is computed anew")
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
        """Queue a row; raises whatever says that it cannot be served."""
        prompt, params = row[self.column], self.sampling_params
        params = (params if isinstance(params, SamplingParams) else params(row)).clone()
        if params.n != 1 or params.logprobs is not None or params.prompt_logprobs is not None:
            raise ValueError("a row has one answer, of text and tokens: n must be 1, and logprobs None")
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            [prompt] = self.llm.render_chat([prompt])
        self.llm.add_request(request_id, prompt, params)
