# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of batch invariance (tests/v1/determinism/test_batch_invariance.py of its sdist) on libattn as CUSTOM.

usage: invariance_tests.py SDIST FOLDER MODEL BACKEND [pytest options]      MODEL: of integrations/device.py, made in FOLDER

The file runs as it is; set from here are the backend, also where the file names one, the engine's sizes, captured decodes without
torch.compile, norms by torch, and a model with random weights and a tokenizer, since there is no hub.
"""
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_gpu
import pytest
import torch
from device import COMMON, MODELS
from models import invent

os.environ["VLLM_BATCH_INVARIANT"] = "1"


def tokenizer(folder: Path, size: int) -> None:
    """A token is a character, so that a text has the tokens that made it; the second is the end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "</s>"
    made = Tokenizer(models.WordLevel({(end if i == 1 else chr(i if 31 < i < 127 or i == 10 else 0x4E00 + i)): i for i in range(size)}, chr(0x4E00)))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, clean_up_tokenization_spaces=False).save_pretrained(folder)


class Setting:
    """What a machine with the hub would bring; a plugin of pytest."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    @pytest.fixture(autouse=True)
    def freed(self) -> Iterator[None]:
        yield
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def engine(self, **options: Any) -> Any:
        """In place of vLLM's `LLM`."""
        from vllm import LLM

        options["attention_config"] = {**(options.get("attention_config") or {}), "backend": self.backend}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
        return LLM(**options | {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30, "compilation_config": graphs,
                                "mamba_ssm_cache_dtype": "float32", **on_gpu.norms_by_torch(graphs)})


def main() -> int:
    sdist, folder, name, backend, *rest = sys.argv[1:]
    tests, model = Path(sdist).resolve() / "tests/v1/determinism", Path(folder).resolve() / f"{name}-{backend}"
    invent(model, MODELS[name][1], 0.05)
    tokenizer(model, COMMON["vocab_size"])
    os.environ["VLLM_TEST_MODEL"] = str(model)
    sys.path.insert(0, str(tests))
    from libattn.integrations.vllm import register

    register()
    on_gpu.compile_in_threads()
    import test_batch_invariance as module
    import utils

    setting = Setting("CUSTOM" if backend == "libattn" else backend)
    utils.BACKENDS[:] = [setting.backend]
    module.LLM = setting.engine
    return int(pytest.main(["-p", "no:cacheprovider", "-q", "-W", "ignore", f"--rootdir={tests}", f"{tests}/test_batch_invariance.py",
                            *rest], plugins=[setting]))


if __name__ == "__main__":
    sys.exit(main())
