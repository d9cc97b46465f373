# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model over SGLang's torch_native backend, which has none of its own: it runs the pieces of prompts of the draft model.
Imported before SGLang's workers are."""
from __future__ import annotations

from typing import Any

from sglang.srt.speculative import draft_utils


def _create_backend(factory: Any, *_: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


draft_utils.DraftBackendFactory._create_backend = _create_backend
