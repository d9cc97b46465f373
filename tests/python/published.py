# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for an engine's modules, made of its recorded interface: names, parameters and defaults alone.

They let an adapter be imported and called as the engine would call it. That is not the engine: nothing here says that
the adapter ran inside it.
"""
from __future__ import annotations

import ast
import enum
import inspect
import json
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "interfaces"


@dataclass
class Method:
    """What is recorded of one: ``abstract classmethod (cls, dtype, block_size=None)``; defaults are source text."""

    words: list[str]  #: abstract; staticmethod, classmethod or property
    arguments: ast.arguments

    @classmethod
    def parse(cls, text: str) -> Method:
        words, parameters = text.split("(", 1)
        expression = ast.parse(f"lambda {parameters.removesuffix(')')}: 0", mode="eval")
        assert isinstance(expression.body, ast.Lambda)
        return cls(words.split(), expression.body.args)

    def positional(self) -> list[str]:
        """Parameters that may be given by position, without self or cls."""
        return [a.arg for a in self.arguments.args if a.arg not in ("self", "cls")]

    def required(self) -> list[str]:
        """Those of them without a default."""
        names = self.positional()
        return names[:len(names) - len(self.arguments.defaults)]

    def names(self) -> list[str]:
        """All that may be given by name."""
        return self.positional() + [a.arg for a in self.arguments.kwonlyargs]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A recording by what it changes of another; false: what the other has and this one has not."""
    whole = base | {key: merged(base.get(key, {}), value) if isinstance(value, dict) else value
                    for key, value in changes.items()}
    return {key: value for key, value in whole.items() if value is not False}


def load(name: str) -> dict[str, Any]:
    """A file of the recordings as a whole, without ``.json``: those of older releases are changes of a newer one."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return merged(load(recorded.pop("base")), recorded) if "base" in recorded else recorded


def read(name: str) -> dict[str, Any]:
    """A recording, by its file's name without ``.json``, its methods parsed."""
    recorded = load(name)
    for items in recorded["modules"].values():
        for content in items.values():
            if isinstance(content, dict):
                content["methods"] = {key: Method.parse(text) for key, text in content["methods"].items()}
    return recorded


def _method(name: str, recorded: Method) -> Any:
    def missing(*args: Any, **kwargs: Any) -> Any:
        if name in ("__init__", "__new__"):
            return None
        raise NotImplementedError(name)

    missing.__name__ = name
    function: Any = abstractmethod(missing) if "abstract" in recorded.words else missing
    for wrap in (staticmethod, classmethod, property):
        if wrap.__name__ in recorded.words:
            return wrap(function)
    return function


def _enum(name: str, attributes: dict[str, str | None], text: bool) -> Any:
    members = {}
    for number, (member, value) in enumerate(attributes.items()):
        members[member] = number + 1 if value in (None, "auto()") else json.loads(
            value.replace("'", '"') if value.startswith("'") else value)
    return enum.Enum(name, members, type=str) if text else enum.IntEnum(name, members)


def _class(name: str, recorded: dict[str, Any], made: dict[str, Any]) -> Any:
    bases = recorded["bases"].split(", ")
    if any("Enum" in base for base in bases):
        values = recorded["attributes"].values()
        return _enum(name, recorded["attributes"], any(v and v.startswith("'") for v in values))
    parents = [made[base.split("[")[0]] for base in bases if base.split("[")[0] in made]
    body: dict[str, Any] = {key: None for key in recorded["attributes"]}
    body |= {key: _method(key, value) for key, value in recorded["methods"].items() if key != "__new__"}
    body["__class_getitem__"] = classmethod(lambda cls, _: cls)
    if name == "MultipleOf":
        body["__init__"] = lambda self, base: setattr(self, "base", base)
    if name == "AttentionMetadataBuilder":
        def start(self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (kv_cache_spec, layer_names,
                                                                                   vllm_config, device)
        body["__init__"] = start
    return types.new_class(name, tuple(parents) or (ABC,), exec_body=lambda ns: ns.update(body))


def install(name: str, extra: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Put stand-ins for the recorded modules, and `extra` ones, into ``sys.modules``; returns the recording."""
    recorded = read(name)
    for path, items in recorded["modules"].items():
        made: dict[str, Any] = {}
        for item, content in items.items():
            made[item] = None if isinstance(content, str) else _class(item, content, made)
        extra.setdefault(path, {})
        extra[path] = {**{k: v for k, v in made.items() if v is not None}, **extra[path]}
    put(extra)
    return recorded


def put(stand_ins: dict[str, dict[str, Any]]) -> None:
    """Make modules, or add to them."""
    for path, items in stand_ins.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            module = sys.modules.setdefault(package, types.ModuleType(package))
            module.__path__ = []  # a package, so that its parts can be imported
            if end > 1:
                setattr(sys.modules[".".join(parts[:end - 1])], parts[end - 1], module)
        sys.modules[path].__dict__.update(items)


def mismatches(ours: type, recorded: dict[str, Any]) -> list[str]:
    """Recorded methods that the adapter overrides and could not be called as the engine calls them."""
    wrong = []
    for name, method in recorded["methods"].items():
        if name not in vars(ours) or "property" in method.words:
            continue
        bound = inspect.signature(inspect.unwrap(getattr(ours, name)))
        given = [None] if next(iter(bound.parameters), "") == "self" else []
        try:
            bound.bind(*given, *[None] * len(method.positional()))
            bound.bind(*given, **dict.fromkeys(method.names()))
            bound.bind(*given, **dict.fromkeys(method.required()))
        except TypeError as error:
            wrong.append(f"{ours.__name__}.{name}: {error}")
    return wrong
