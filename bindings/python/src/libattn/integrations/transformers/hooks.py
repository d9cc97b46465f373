# SPDX-License-Identifier: Apache-2.0
"""Where Transformers needs more than the name of an attention.

Models that compute their attention themselves (BLOOM, for one) take any registered name and go on as before: for ours
they are refused aloud. So are text decoders whose configuration names a head size that no backend serves, before their weights are
loaded.

Continuous batching: Transformers 5 takes its own implementations alone for it. It compares the name with a list, and
offers block tables only to names with ``flash`` in them. Two functions are wrapped so that ours is taken too; for
every other name they do what they did. Where they are not found (another release), continuous batching stays as it
is and refuses the name itself.
"""
from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from ..._declarations import Status
from ...errors import AttnError, make
from ...torch import dense
from ...torch.store import DTYPES, store

_MARK = "_libattn_wrapped"


def allow_continuous_batching(name: str) -> bool:
    """Let ``model.generate_batch`` run with an implementation; True if this release can."""
    try:
        from transformers.generation.continuous_batching import continuous_api, initialization
        manager = continuous_api.ContinuousBatchingManager
        switch = manager.switch_to_cb_friendly_attn
        ensure = initialization.ensure_decode_fast_path_is_available
        types, group = initialization.ATTN_TYPE_TO_ALLOCATOR, initialization.group_layers_by_attn_type
    except (ImportError, AttributeError):
        return False
    if not hasattr(switch, _MARK):
        @functools.wraps(switch)
        def switched(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            if model.config._attn_implementation != name:
                switch(self, model, *args, **kwargs)

        setattr(switched, _MARK, True)
        manager.switch_to_cb_friendly_attn = switched
    if not hasattr(ensure, _MARK):
        @functools.wraps(ensure)
        def ensured(config: Any, cb_config: Any, user_requested: bool) -> None:
            tables = all(types[kind].supports_block_table for kind in group(config))
            if config._attn_implementation != name or not tables:
                ensure(config, cb_config, user_requested)

        setattr(ensured, _MARK, True)
        initialization.ensure_decode_fast_path_is_available = ensured
    return True


#: The end of every refusal.
ADVICE = "set attn_implementation to another one than libattn, such as 'sdpa'"


def _declares(config: Any, name: str) -> bool:
    """Whether a configuration's class has a field. Other fields of a checkpoint's file are kept, and no model reads them."""
    kind = type(config)
    return (hasattr(kind, name) or name in config.attribute_map or name in inspect.signature(kind.__init__).parameters or
            dataclasses.is_dataclass(kind) and name in {field.name for field in dataclasses.fields(kind)})


def _heads(config: Any) -> tuple[int, int]:
    """Heads of queries and of keys; one and one where the configuration does not name them for all its layers."""
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) if _declares(config, "num_key_value_heads") else None
    keys = queries if keys is None else keys
    if isinstance(queries, int) and isinstance(keys, int) and min(queries, keys) > 0 and queries % keys == 0:
        return queries, keys
    return 1, 1


def _sizes(config: Any) -> tuple[int, int, int, int] | None:
    """Heads of queries and keys, sizes of keys and values, where a text decoder's configuration names the latter for all its layers."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as decoders

        if config.model_type not in decoders:
            return None
        key = value = getattr(config, "head_dim", None) if _declares(config, "head_dim") else None
        if getattr(config, "kv_lora_rank", None):
            key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        heads = _heads(config)
    except Exception:  # noqa: BLE001 not judged: configurations whose sizes differ by layer (Gemma 4's) raise, or another release
        return None
    return (*heads, key, value) if isinstance(key, int) and isinstance(value, int) and min(key, value) > 0 else None


def refuse_head_sizes(model: Any) -> None:
    """Raise if no backend, on any device that is here, serves the head sizes that the configuration names. Nothing else is judged
    before a call: it alone knows the tensors' dtype, their padding and the other terms."""
    sizes, refusal = _sizes(model.config), None
    if sizes is None:
        return
    for device, dtype in itertools.product({device.device for device in store.runtime.devices}, DTYPES):
        try:
            desc = dense.describe("decoder", *sizes, dtype, 1.0, True, None, 0.0, False, 0)
            store.runtime.select([desc], backend="", device=device)
            return
        except AttnError as error:
            refusal = error
    if refusal is not None:
        raise make(refusal.status, refusal.field, f"{refusal.message}\n  layers of {type(model).__name__}; {ADVICE}")


def refuse_models_without_hook(name: str) -> None:
    """Raise where a model would take the name and never call us, or where no backend serves it."""
    from transformers import PreTrainedModel

    def can_set(model: Any) -> bool:
        ask = getattr(model, "_can_set_attn_implementation", None)
        return ask is None or bool(ask())

    def check(model: Any) -> None:
        if not can_set(model):
            raise make(Status.UNSUPPORTED, "attn_implementation",
                       f"'{name}' for {type(model).__name__}, which computes its attention itself; supported: "
                       f"models that ask Transformers' AttentionInterface; {ADVICE}")
        refuse_head_sizes(model)

    def check_all(model: Any) -> None:
        """The model and the parts that Transformers will switch, before it switches one. Parts of one configuration are alike."""
        check(model)
        parts = {id(part.config): part for part in model.modules() if isinstance(part, PreTrainedModel) and can_set(part)}
        for part in parts.values():
            if part.config is not model.config:
                refuse_head_sizes(part)

    def wrap(method: str, check: Callable[[Any], None]) -> None:
        inner = getattr(PreTrainedModel, method)
        if hasattr(inner, _MARK):
            return
        parameter = list(inspect.signature(inner).parameters)[1]  # its name differs by method and release

        @functools.wraps(inner)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (args[0] if args else kwargs.get(parameter)) == name:
                check(self)
            return inner(self, *args, **kwargs)

        setattr(checked, _MARK, True)
        setattr(PreTrainedModel, method, checked)

    wrap("get_correct_attn_implementation", check)
    wrap("set_attn_implementation", check_all)
