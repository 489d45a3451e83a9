"""Routes to list, plan, load and unload models.

They follow TabbyAPI's API; ``/v1/plan`` is exkv's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import StreamingResponse
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from exkv.decode.speculation import OWN_HEAD
from exkv.weights.on_load import BEST

from .answers import UNCACHED, RequestError, event
from .hosting import CACHE_BITS, ModelFolder, ServedModel, ServeOptions
from .serving import Serving, in_new_thread

#: Cache names of TabbyAPI and of exkv.
_MODES = {"FP16": "fp16", "Q8": "8bit", "Q4": "4bit", BEST: BEST, **{n: n for n in CACHE_BITS}}
_TABBY_NAMES = {"fp16": "FP16", "8bit": "Q8", "4bit": "Q4", "2bit": "Q2"}
_MIB = 1 << 20

Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class DraftRequest(BaseModel):
    """The draft model, in TabbyAPI's format; "mtp" for the model's own head."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: Annotated[Name, Field(validation_alias=AliasChoices("draft_model_name", "name"))]


class LoadRequest(BaseModel):
    """``/v1/model/load``. Defaults are the options that the server was started with, except the
    draft, which belongs to its model. TabbyAPI's fields that exkv doesn't have may be null."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: Annotated[Name, Field(validation_alias=AliasChoices("model_name", "name", "model"))]
    max_seq_len: Tokens | None = None
    cache_size: Tokens | None = None
    cache_mode: Annotated[
        str | None, Field(validation_alias=AliasChoices("cache_mode", "cache"))
    ] = None
    chunk_size: Tokens | None = None
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpu_split_auto: bool | None = None
    gpu_split: Annotated[list[float], Field(max_length=64)] | None = None
    autosplit_reserve: (
        Annotated[list[Annotated[float, Field(ge=0, le=1 << 30)]], Field(max_length=64)] | None
    ) = Field(default=None, description="MiB to leave free on each device")
    weights: str | None = None
    dtype: str | None = None
    draft_model: DraftRequest | None = None
    skip_queue: Annotated[bool, Field(description="cancel running jobs")] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    def options(self, usual: ServeOptions, folder: ModelFolder | None) -> ServeOptions:
        """Load options: those of the request, the rest from ``usual``; lengths default to the
        model's.

        Raises:
            ValueError: an invalid value.
            RequestError: the folder has no such draft.
        """
        given: dict[str, Any] = {
            "cache": None if self.cache_mode is None else _cache(self.cache_mode),
            "chunk_size": self.chunk_size,
            "max_running": self.max_batch_size,
            "dtype": self.dtype,
        }
        return replace(
            usual,
            max_seq_len=self.cache_size or self.max_seq_len,
            weights=self.weights,
            draft=None if self.draft_model is None else _draft(folder, self.draft_model.name),
            **{name: value for name, value in given.items() if value is not None},
            **self._split(),
        )

    def _split(self) -> dict[str, Any]:
        if self.gpu_split and not self.gpu_split_auto:
            return {"gpu_split": tuple(self.gpu_split), "reserve": None}
        if self.autosplit_reserve:
            sizes = tuple(int(size * _MIB) for size in self.autosplit_reserve)
            return {"gpu_split": None, "reserve": sizes[0] if len(sizes) == 1 else sizes}
        return {}


class UnloadRequest(BaseModel):
    """``/v1/model/unload``; the body may be left out."""

    model_config = ConfigDict(extra="forbid")

    skip_queue: Annotated[bool, Field(description="cancel running jobs")] = False


def _cache(mode: str) -> str:
    if mode not in _MODES:
        raise ValueError(f"cache_mode is {mode[:40]!r}; it must be one of {', '.join(_MODES)}")
    return _MODES[mode]


def card(name: str, created: int = 0) -> dict[str, Any]:
    """A model's entry in lists."""
    return {"id": name, "object": "model", "created": created, "owned_by": "exkv"}


def _full_card(model: ServedModel) -> dict[str, Any]:
    """The loaded model's entry, with TabbyAPI's parameters."""
    tokens, options = model.engine.max_tokens, model.options
    parameters = {
        "max_seq_len": tokens,
        "cache_size": tokens,
        "cache_mode": _TABBY_NAMES.get(options.cache, options.cache),
        "chunk_size": options.chunk_size or model.chunk,
        "max_batch_size": options.max_running,
        "rope_scale": 1.0,
        "rope_alpha": 1.0,
        "prompt_template": next(iter(model.engine.tokenizer.chat_templates), None),
    }
    return {**card(model.name, model.created), "parameters": parameters}


def add_models(app: FastAPI, serving: Serving) -> None:
    """Add the routes."""
    usual = ServeOptions() if serving.loaded is None else serving.loaded.options
    planning = asyncio.Lock()  # one at a time: a plan takes CPU time and memory
    _add_lists(app, serving)
    _add_changes(app, serving, usual)

    @app.get("/v1/plan")
    async def plan(
        model: Annotated[str, Query(max_length=512)] = "",
        max_seq_len: Annotated[str, Query(pattern=r"^([1-9][0-9]{0,8}|max)$")] | None = None,
        cache: Annotated[str, Query(max_length=40)] | None = None,
        weights: Annotated[str, Query(max_length=40)] | None = None,
        draft: Annotated[str, Query(max_length=512)] = "",
    ) -> dict[str, Any]:
        """The placement if this model replaced the loaded one."""
        name = model or serving.model.name
        longest = max_seq_len == "max"
        tokens = int(max_seq_len) if max_seq_len and not longest else None

        def planned() -> dict[str, Any]:
            mode = None if cache is None else _cache(cache)
            options = replace(
                usual,
                max_seq_len=tokens,
                weights=weights,
                cache=mode or usual.cache,
                draft=_draft(serving.folder, draft) if draft else None,
            )
            prepared = serving.prepare(_path(serving.folder, name), options, name)
            return prepared.plan(serving.leaving, longest)

        try:
            async with planning:
                return await in_new_thread(planned)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(str(error)[:500]) from None


def _add_lists(app: FastAPI, serving: Serving) -> None:
    def names() -> list[str]:
        loaded = [] if serving.loaded is None else [serving.loaded.name]
        others = [] if serving.folder is None else list(serving.folder.models())
        return list(dict.fromkeys([*loaded, *others]))

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    @app.get("/v1/model/list", include_in_schema=False)
    async def models() -> dict[str, Any]:
        found = await asyncio.to_thread(names)
        return {"object": "list", "data": [card(name) for name in found]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in await asyncio.to_thread(names):
            raise RequestError(f"there is no model {name[:80]!r}", 404, code="model_not_found")
        return card(name)

    @app.get("/v1/model")
    async def loaded() -> dict[str, Any]:
        return _full_card(serving.model)


def _add_changes(app: FastAPI, serving: Serving, usual: ServeOptions) -> None:
    @app.post("/v1/model/load")
    async def load(asked: LoadRequest) -> StreamingResponse:
        """Replace the loaded model; progress is streamed as events."""
        path = _path(serving.folder, asked.name)
        prepared = await serving.prepared(
            lambda: serving.prepare(path, asked.options(usual, serving.folder), asked.name)
        )
        steps = serving.load(prepared, now=asked.skip_queue)

        async def events() -> AsyncGenerator[str]:
            async for each in steps:
                yield event(each)

        return StreamingResponse(events(), media_type="text/event-stream", headers=UNCACHED)

    @app.post("/v1/model/unload")
    async def unload(asked: UnloadRequest | None = None) -> dict[str, str]:
        await serving.unload(now=asked is not None and asked.skip_queue)
        return {"status": "unloaded"}


def _draft(folder: ModelFolder | None, name: str) -> Path | str:
    """A draft's path, or "mtp" for the model's own head; raises as :func:`_path` does."""
    return name if name == OWN_HEAD else _path(folder, name)


def _path(folder: ModelFolder | None, name: str) -> Path:
    """A model's path.

    Raises:
        RequestError: the folder has no such model.
    """
    path = None if folder is None else folder.find(name)
    if path is None:
        where = "" if folder is None else f" in {folder.path}: GET /v1/models lists all of them"
        raise RequestError(
            f"there is no model {json.dumps(name)[:80]}{where}", 404, code="model_not_found"
        )
    return path
