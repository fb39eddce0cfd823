"""Endpoints for pooling models: OpenAI's /v1/embeddings, and vLLM's score, rerank and classify.

`service.Service` holds the engine and limits the number of waiting requests. `gate.Gate` makes the tickets.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from nanoengine.apps.openai_api import JSON, APIError, refusing, sampling_fields, unavailable
from nanoengine.contrib.pooling import PoolingParams, PoolingRequestOutput
from nanoengine.requests import check_unicode, split_prompts

# ---- Requests ------------------------------------------------------------------------------------


class PoolingRequest(BaseModel):
    """Holds the fields that all pooling requests have."""

    prefix: ClassVar[str]
    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None

    @property
    def num_prompts(self) -> int:
        """At least the number of prompts for the engine, counted without reading any of them."""
        raise NotImplementedError

    def params(self, **own: Any) -> PoolingParams:
        """Return the request's PoolingParams.

        Raises:
            APIError: a field is not supported.
            ValueError, TypeError: a parameter is out of range.
        """
        sampling_fields(self)
        cut = self.truncate_prompt_tokens
        return PoolingParams(use_activation=self.use_activation, truncate_prompt_tokens=cut, **own)


class InputRequest(PoolingRequest):
    """A request with an input: a text, a list of texts, token ids, or a list of lists of token ids."""

    input: Any
    add_special_tokens: bool = True

    @property
    def num_prompts(self) -> int:
        """The number of inputs."""
        if not isinstance(self.input, str | list):
            raise TypeError(f"input must be text, token ids, or a list of these, got {self.input!r:.99}")
        if not self.input:
            raise ValueError("input must hold at least one token")
        return len(split_prompts(self.input))

    def prompts(self, encode: Callable[[str, bool], list[int]]) -> list[Any]:
        """Return the inputs in a form that the engine accepts."""
        return [
            encode(check_unicode("input", one), False)
            if isinstance(one, str) and not self.add_special_tokens
            else one
            for one in split_prompts(self.input)
        ]


class EmbeddingRequest(InputRequest):
    """A request to /v1/embeddings."""

    prefix = "embd"
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ClassifyRequest(InputRequest):
    """A request to /classify."""

    prefix = "classify"


class ScoreRequest(PoolingRequest):
    """A request to /v1/score: pairs of texts, under any of the names that vLLM has for them."""

    prefix = "score"
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None

    @property
    def texts(self) -> tuple[Any, Any]:
        """The first and the second texts of the pairs. Raises TypeError if either is missing."""
        found = []
        for names in (("data_1", "text_1", "queries"), ("data_2", "text_2", "documents", "items")):
            given = [getattr(self, name) for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise TypeError(f"{names[0]} must be given, once: a text or a list of texts")
            found += given
        return found[0], found[1]

    @property
    def num_prompts(self) -> int:
        """The number of texts on both sides, which is at least the number of pairs."""
        return sum(len(data) if isinstance(data, list) else 1 for data in self.texts)


class RerankRequest(PoolingRequest):
    """A request to /v1/rerank, which orders documents by their score with a query."""

    prefix = "rerank"
    query: str
    documents: str | list[str]
    top_n: int = 0  # how many of the best to return; 0: all

    @property
    def texts(self) -> tuple[Any, Any]:
        """The query and the documents."""
        return self.query, self.documents

    @property
    def num_prompts(self) -> int:
        """The number of texts: the query and the documents."""
        return 1 + (len(self.documents) if isinstance(self.documents, list) else 1)


# ---- The endpoints -------------------------------------------------------------------------------


class PoolingAPI:
    """Serves the pooling endpoints with the engine of a `service.Service`."""

    def __init__(self, service: Any) -> None:
        self.service = service

    def routes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each route as method, path and endpoint."""
        yield "POST", "/v1/embeddings", self.embeddings
        yield "POST", "/classify", self.classify
        for path in ("/score", "/v1/score"):
            yield "POST", path, self.score
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            yield "POST", path, self.rerank

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        """POST /v1/embeddings."""
        with refusing(body):
            params = body.params(task="embed", dimensions=body.dimensions)
        outputs = await self.pool(body, request, params, self.read_input)
        arrays = [output.outputs.data.numpy() for output in outputs]
        return self.answer(
            body,
            request,
            data=[
                {"object": "embedding", "index": index, "embedding": encoded(array, body.encoding_format)}
                for index, array in enumerate(arrays)
            ],
        )

    async def classify(self, body: ClassifyRequest, request: Request) -> Response:
        """POST /classify."""
        with refusing(body):
            params = body.params(task="classify")
        outputs = await self.pool(body, request, params, self.read_input)
        labels = self.service.checkpoint.pooling.labels
        rows = [output.outputs.data.tolist() for output in outputs]
        data = [
            {"index": i, "label": labels[row.index(max(row))], "probs": row, "num_classes": len(row)}
            for i, row in enumerate(rows)
        ]
        return self.answer(body, request, data=data)

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """POST /v1/score."""
        scores = await self.scores(body, request)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return self.answer(body, request, data=data)

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """POST /v1/rerank."""
        if body.top_n < 0:
            raise APIError(400, f"top_n must be at least 0, got {body.top_n}", param="top_n")
        scores = await self.scores(body, request)
        documents = body.documents if isinstance(body.documents, list) else [body.documents]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [
            {"index": i, "document": {"text": documents[i]}, "relevance_score": scores[i]} for i in order
        ]
        return self.answer(body, request, results=results)

    # -- shared by the endpoints

    async def scores(self, body: ScoreRequest | RerankRequest, request: Request) -> list[float]:
        """Return the score of each pair of texts."""
        with refusing(body):
            params = body.params()
        planned: list[Any] = []

        def read(_: Any) -> list[Any]:
            engine = self.service.engine.llm_engine
            planned.append(engine.pooler.plan_scores(*body.texts, engine.checker))
            return list(planned[0].prompts)

        outputs = await self.pool(body, request, params, read)
        return [one.outputs.score for one in planned[0].read(outputs)]

    def read_input(self, body: InputRequest) -> list[Any]:
        """Return the prompts of a request with an input."""
        return body.prompts(self.service.engine.llm_engine.checker.encode)

    async def pool(
        self, body: Any, request: Request, params: PoolingParams, read: Callable[[Any], list[Any]]
    ) -> list[PoolingRequestOutput]:
        """Compute the prompts that `read` returns. `read` runs in a thread: tokenizing may be slow.

        Raises:
            APIError: the request cannot be served.
        """
        service, ticket = self.service, request.state.ticket
        service.check_model(body.model)
        if service.engine.llm_engine.pooler is None:
            raise APIError(400, f"{request.url.path} needs a server of a model that pools: --runner pooling")
        service.take_places(body, 1, ticket)

        def check() -> list[Any]:
            with refusing(body):
                engine = service.engine.llm_engine
                return [engine.check(prompt, params, body.priority or 0) for prompt in read(body)]

        checked = await service.in_thread(request, check)
        ticket.prompt_tokens = sum(len(one.token_ids) for one in checked)

        async def one(index: int) -> PoolingRequestOutput:
            async for output in service.engine.encode(checked[index], params, f"{ticket.id}-{index}"):
                return output  # type: ignore[no-any-return]
            raise RuntimeError("the engine has stopped")

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(checked))]
        try:
            outputs: Sequence[PoolingRequestOutput] = await asyncio.gather(*tasks)
        except RuntimeError as error:
            if not service.is_serving:
                raise unavailable("the server is shutting down") from None
            raise APIError(500, f"the model could not compute this request: {error}") from None
        finally:
            for task in tasks:
                task.cancel()
        ticket.first_output_seconds = time.monotonic() - ticket.started
        ticket.cached_tokens = sum(output.num_cached_tokens for output in outputs)
        return list(outputs)

    def answer(self, body: PoolingRequest, request: Request, **content: Any) -> Response:
        """Wrap the computed content in a response with id, model name and usage."""
        ticket = request.state.ticket
        head = {"id": f"{body.prefix}-{ticket.id}", "object": "list", "created": int(time.time())}
        return JSON({**head, "model": self.service.name, **content, "usage": ticket.usage()})


def encoded(array: np.ndarray, encoding_format: str) -> list[float] | str:
    """Return an embedding as numbers, or as the base64 of little-endian float32.

    >>> encoded(np.array([1.0, -2.0], dtype=np.float32), "base64")
    'AACAPwAAAMA='
    """
    if encoding_format == "base64":
        return base64.b64encode(array.astype("<f4").tobytes()).decode()
    return array.tolist()  # type: ignore[no-any-return]
