# SPDX-License-Identifier: Apache-2.0
"""examples/onnxruntime.c next to ONNX Runtime's own GroupQueryAttention: a prompt, 200 tokens one by one, and a step back.

usage: compare.py LIBRARY     the example's shared object

Prints the largest distance of an element; exit 1 where it is more than 1e-5, or where inputs that do not fit are not refused.
"""
from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

HQ, HK, D = 8, 2, 64


def session(domain: str, window: int, library: str | None = None) -> onnxruntime.InferenceSession:
    """A model of one node; ONNX Runtime's has the cache in its inputs and outputs."""
    own = library is None
    kept = ["past_key", "past_value", "seqlens_k", "total_sequence_length"] if own else ["past"]
    node = helper.make_node("GroupQueryAttention", ["q", "k", "v", *kept], ["out", "key", "value"] if own else ["out"], domain=domain,
                            num_heads=HQ, kv_num_heads=HK, local_window_size=window)
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, f"T_{name}", heads * D if own else f"D_{name}"])
            for name, heads in (("q", HQ), ("k", HK), ("v", HK), ("out", HQ))]
    inputs, outputs = rows[:3], rows[3:]
    if own:
        caches = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, HK, length, D]) for name, length in (
            ("past_key", "P"), ("past_value", "P"), ("key", "L"), ("value", "L"))]
        inputs += [*caches[:2], helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
                   helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1])]
        outputs += caches[2:]
    else:
        inputs += [helper.make_tensor_value_info("past", TensorProto.INT64, [1])]
    model = helper.make_model(helper.make_graph([node], "attention", inputs, outputs), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> int:
    apart, generator = 0.0, np.random.default_rng(3)
    for window in (-1, 24):
        theirs, ours = session("com.microsoft", window), session("libattn", window, sys.argv[1])
        cache = [np.zeros((1, HK, 0, D), np.float32)] * 2
        for tokens, back in ((20, 0), *((1, 0),) * 200, (7, 30), (1, 0)):  # back: tokens that are given up
            cache = [part[:, :, :part.shape[2] - back] for part in cache]
            past = cache[0].shape[2]
            rows = {name: generator.standard_normal((1, tokens, heads * D), np.float32) for name, heads in (
                ("q", HQ), ("k", HK), ("v", HK))}
            expected, *cache = theirs.run(None, rows | {
                "past_key": cache[0], "past_value": cache[1], "seqlens_k": np.array([past + tokens - 1], np.int32),
                "total_sequence_length": np.array([past + tokens], np.int32)})
            found, = ours.run(None, rows | {"past": np.array([past])})
            apart = max(apart, float(np.abs(found - expected).max()))
    wrong = [({"past": np.array([past + 2])}, "past is"), ({"q": rows["q"][:, :, :-1]}, "query has"),
             ({"k": rows["k"][:, :, D:]}, "key is"), ({"v": rows["v"][:, :0]}, "value is")]
    refused = True
    for change, why in wrong:
        try:
            ours.run(None, rows | {"past": np.array([past])} | change)
            refused = False
        except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument as error:
            refused = refused and why in str(error)
    print(f"onnxruntime {onnxruntime.__version__}: {apart:.1e} from its own GroupQueryAttention, "
          f"{'' if refused else 'NOT '}refused what does not fit")
    return int(not (apart <= 1e-5 and refused))


if __name__ == "__main__":
    sys.exit(main())
