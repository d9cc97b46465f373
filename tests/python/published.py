# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for an engine's modules, made of its recorded interface: names, parameters and defaults alone.

They let an adapter be imported and called as the engine would call it. That is not the engine: nothing here says that
the adapter ran inside it.
"""
from __future__ import annotations

import enum
import inspect
import json
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "interfaces"


def read(name: str) -> dict[str, Any]:
    """A recording, by its file's name without ``.json``."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    """As `inspect` would give it; a default is its source text."""
    kinds = {"var_positional": inspect.Parameter.VAR_POSITIONAL, "keyword": inspect.Parameter.KEYWORD_ONLY,
             "var_keyword": inspect.Parameter.VAR_KEYWORD}
    return inspect.Signature([
        inspect.Parameter(p["name"], kinds.get(p.get("kind", ""), inspect.Parameter.POSITIONAL_OR_KEYWORD),
                          default=inspect.Parameter.empty if p.get("default") is None else p["default"])
        for p in parameters])


def _method(name: str, recorded: dict[str, Any]) -> Any:
    def missing(*args: Any, **kwargs: Any) -> Any:
        if name in ("__init__", "__new__"):
            return None
        raise NotImplementedError(name)

    missing.__name__ = name
    function: Any = abstractmethod(missing) if recorded["abstract"] else missing
    wrap = {"staticmethod": staticmethod, "classmethod": classmethod, "property": property}.get(recorded["how"])
    return wrap(function) if wrap else function


def _enum(name: str, attributes: dict[str, str | None], text: bool) -> Any:
    members = {}
    for number, (member, value) in enumerate(attributes.items()):
        members[member] = number + 1 if value in (None, "auto()") else json.loads(
            value.replace("'", '"') if value.startswith("'") else value)
    return enum.Enum(name, members, type=str) if text else enum.IntEnum(name, members)


def _class(name: str, recorded: dict[str, Any], made: dict[str, Any]) -> Any:
    bases = recorded["bases"]
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
            made[item] = None if "function" in content else _class(item, content, made)
        extra.setdefault(path, {})
        extra[path] = {**{k: v for k, v in made.items() if v is not None}, **extra[path]}
    for path, items in extra.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            module = sys.modules.setdefault(package, types.ModuleType(package))
            module.__path__ = []  # a package, so that its parts can be imported
            if end > 1:
                setattr(sys.modules[".".join(parts[:end - 1])], parts[end - 1], module)
        sys.modules[path].__dict__.update(items)
    return recorded


def mismatches(ours: type, recorded: dict[str, Any], engine_calls: set[str] | None = None) -> list[str]:
    """Recorded methods that the adapter overrides and could not be called as the engine calls them."""
    wrong = []
    for method, content in recorded["methods"].items():
        if method not in vars(ours) or content["how"] == "property":
            continue
        if engine_calls is not None and method not in engine_calls:
            continue
        function = inspect.unwrap(getattr(ours, method))
        parameters = [p for p in content["parameters"] if p["name"] not in ("self", "cls", "args", "kwargs")]
        bound = inspect.signature(function)
        first = next(iter(bound.parameters), "")
        given = [None] if first == "self" else []
        positional = [p for p in parameters if p.get("kind") != "keyword"]
        try:
            bound.bind(*given, *[None] * len(positional))  # all by position
            bound.bind(*given, **{p["name"]: None for p in parameters})  # all by name
            required = {p["name"]: None for p in parameters if p.get("default") is None and not p.get("kind")}
            bound.bind(*given, **required)  # only what has no default
        except TypeError as error:
            wrong.append(f"{ours.__name__}.{method}: {error}")
    return wrong
