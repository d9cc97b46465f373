# SPDX-License-Identifier: Apache-2.0
"""SGLang: an attention backend under the name ``libattn``.

The entry point ``sglang.srt.plugins`` calls `register`; then ``--attention-backend libattn``. Which of libattn's
backends serves which layer, and ``ATTN_BACKEND``, is libattn's own choice.
"""
from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "libattn"


def register() -> None:
    """Make the backend known to SGLang's registry and to its command line."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils.common import is_cpu

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from .backend import LibattnBackend

        if runner.use_mla_backend:
            _latent_queries()
        return LibattnBackend(runner)

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _before_weights, HookType.BEFORE)
    HookRegistry.register("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", _with_states, HookType.AROUND)
    for phase, hook in (("decode", _draft_steps), ("draft_extend", _draft_prompts)):
        HookRegistry.register(f"sglang.srt.speculative.draft_utils.DraftBackendFactory.create_{phase}_backend", hook, HookType.AROUND)
    if is_cpu():  # SGLang asks by the backend's name whether Triton can write its tables, and knows its own names only
        HookRegistry.register("sglang.srt.utils.common.support_triton",
                              lambda original, backend: backend != NAME and original(backend), HookType.AROUND)
    for module in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
        try:
            choices = __import__(module, fromlist=["ATTENTION_BACKEND_CHOICES"]).ATTENTION_BACKEND_CHOICES
        except (ImportError, AttributeError):
            continue
        if NAME not in choices:
            choices.append(NAME)


def _is_asked(runner: Any) -> bool:
    return NAME in (getattr(runner.server_args, f"{phase}attention_backend", None) for phase in ("", "prefill_", "decode_"))


def _before_weights(runner: Any, *_: Any, **__: Any) -> None:
    if _is_asked(runner):
        from .check import before_weights

        before_weights(runner)


def _with_states(original: Any, runner: Any, full_attn_backend: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's backend for models whose layers are of several kinds: with gated delta layers, libattn's next to `full_attn_backend`.
    SGLang's log says which layers another backend serves."""
    if not _is_asked(runner):
        return original(runner, full_attn_backend, *args, **kwargs)
    from .check import serves_states, warn_of_others

    if serves_states(runner):
        from .gdn import with_states

        return with_states(runner, full_attn_backend, runner.model_config.hf_config.get_text_config().full_attention_layer_ids)
    made = original(runner, full_attn_backend, *args, **kwargs)
    if made is not full_attn_backend:
        warn_of_others(runner, full_attn_backend, made)
    return made


def _draft_steps(original: Any, factory: Any) -> Any:
    """The backends of a draft model's steps; SGLang's list of them is closed."""
    if not _drafts_with(factory.draft_model_runner):
        return original(factory)
    from .drafts import decode_backend

    return decode_backend(factory)


def _draft_prompts(original: Any, factory: Any) -> Any:
    """The backend of a draft model's prompts and of the tokens that a step has verified."""
    runner = factory.draft_model_runner
    return runner.attn_backend if _drafts_with(runner) else original(factory)


def _drafts_with(runner: Any) -> bool:
    return _is_asked(runner) and drafts_here(runner.server_args)


def drafts_here(arguments: Any) -> bool:
    """Whether a model drafts over libattn, not over another backend."""
    return getattr(arguments, "speculative_draft_attention_backend", None) in (None, NAME)


def _latent_queries() -> None:
    """Let SGLang's models of multi-head latent attention project all queries into latent space, for prompts too, and hand over their
    rotary parts apart."""
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    attention_backend_handler.AttentionBackendRegistry.register(NAME, lambda attn, forward_batch: AttnForwardMethod.MLA)
    if NAME not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
