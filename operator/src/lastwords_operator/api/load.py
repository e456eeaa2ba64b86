"""From the text of a job file to a FaultTolerantJob, or to a sentence that says what to change and where."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from lastwords_operator.api.job import FaultTolerantJob


class JobFileError(ValueError):
    """The file is no usable job. Each line of the text names the path in the file and what to do."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently take the last one."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if isinstance(key, (list, dict)):
            raise yaml.MarkedYAMLError(None, None, "a key must be plain text", key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(None, None, f"{key!r} is given twice; remove one", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_job(text: str, source: str) -> FaultTolerantJob:
    """
    The job in `text` (YAML or JSON). `source` is the file's name, for the messages.

    Raises JobFileError.
    """
    try:
        documents = [item for item in yaml.load_all(text, Loader=_Loader) if item is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise JobFileError(f"{source}{where}: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise JobFileError(f"{source}: not YAML: {error}") from None
    if len(documents) != 1:
        raise JobFileError(f"{source}: expected one FaultTolerantJob, found {len(documents)} documents")
    if not isinstance(documents[0], dict):
        raise JobFileError(f"{source}: expected keys such as apiVersion, kind, metadata and spec")
    try:
        return FaultTolerantJob.model_validate(documents[0])
    except ValidationError as error:
        lines = [_line(row["loc"], row) for row in error.errors(include_url=False)]
        raise JobFileError("\n".join(f"{source}: {line}" for line in dict.fromkeys(lines))) from None


def _line(location: tuple[int | str, ...], row: Any) -> str:
    path = _path(location)
    kind, given = row["type"], row.get("input")
    if kind == "extra_forbidden":
        known = _siblings(location)
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: missing; add it"
    if kind == "value_error":
        return f"{path}: {row['ctx']['error']}"
    message = row["msg"][:1].lower() + row["msg"][1:]
    return f"{path}: {message}; it is {given!r}"


def _path(location: tuple[int | str, ...]) -> str:
    shown = ""
    for part in location:
        if isinstance(part, int):
            shown += f"[{part}]"
        elif part not in ("constrained-int", "literal['Auto']", "int"):  # pydantic's names for the arms of a union
            shown += f".{part}" if shown else part
    return shown or "the file"


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] | None = FaultTolerantJob
    for part in location[:-1]:
        if model is None or isinstance(part, int):
            continue
        field = next((item for item in model.model_fields.values() if item.alias == part), None)
        model = next(_models(field.annotation), None) if field else None
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
