# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention tests (tests/v1/attention/test_attention_backends.py of its sdist) on libattn as CUSTOM.

usage: attention_tests.py SDIST [pytest options]

The file runs as it is; what it finds on a GPU's machine is set from here: the backends that are tested, and
the models' shapes, which it would load from the hub.
"""
from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Configurations of the models that the tests name: what decides shapes of attention.
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
SHAPES = {
    "meta-llama/Meta-Llama-3-8B": LLAMA,
    "Qwen/Qwen3-0.6B": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
                        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
                        "vocab_size": 151936},
    "microsoft/Phi-tiny-MoE-instruct": {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
                                        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
                                        "sliding_window": 2047},
    "google/embeddinggemma-300m": {**LLAMA, "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text",
                                   "hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 3,
                                   "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 24,
                                   "sliding_window": 257, "max_position_embeddings": 2048,
                                   "use_bidirectional_attention": True},
}
LISTS = ("BACKENDS_TO_TEST", "SLIDING_WINDOW_BACKENDS_TO_TEST", "SLIDING_WINDOW_ENCODER_BACKENDS_TO_TEST",
         "NON_CAUSAL_BACKENDS_TO_TEST")


class Setting:
    """What vLLM's conftest and a GPU's machine would bring; a plugin of pytest."""

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[None]:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            yield

    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        """Before the tests are collected: their module is imported here, and changed in place."""
        import tests.v1.attention.test_attention_backends as module
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        for name in LISTS:
            getattr(module, name)[:] = [AttentionBackendEnum.CUSTOM]
        original = getattr(module._test_backend_correctness, "original", module._test_backend_correctness)

        def correctness(batch_spec: Any, model: str, backends: Any, *args: Any, **kwargs: Any) -> None:
            if AttentionBackendEnum.CUSTOM in backends:  # else FlexAttention, which needs a GPU
                original(batch_spec, model, backends, *args, **kwargs)

        correctness.original = original  # type: ignore[attr-defined]
        module._test_backend_correctness = correctness


def main() -> int:
    sdist = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(sdist))
    from libattn.integrations.vllm import register

    register()
    with tempfile.TemporaryDirectory() as folder:
        for name, config in SHAPES.items():  # a model's name is the path of its folder, too
            (Path(folder) / name).mkdir(parents=True)
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        os.chdir(folder)
        return int(pytest.main(["--noconftest", "-p", "no:cacheprovider", "-q", "--import-mode=importlib", "-W", "ignore",
                                f"--rootdir={sdist}", f"{sdist}/tests/v1/attention/test_attention_backends.py",
                                *sys.argv[2:]], plugins=[Setting()]))


if __name__ == "__main__":
    sys.exit(main())
