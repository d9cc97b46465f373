# SPDX-License-Identifier: Apache-2.0
"""Real weights: all-MiniLM-L6-v2's embeddings of 160 real sentences, next to eager and sdpa."""
import os
import pydoc_data.topics
import re
import subprocess
import sys
import unittest
from pathlib import Path

import torch

import libattn.integrations.transformers as integration
from common import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python" / "examples"))

import embed  # noqa: E402

COSINE = 0.99999


def sentences(count: int = 160) -> list[str]:
    """Sentences of the Python reference, which comes with every interpreter."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    found = re.findall(r"[A-Z][^.!?|*+=]{15,300}[.!?](?=\s)", re.sub(r"\s+", " ", text))
    return list(dict.fromkeys(found))[:count]


class MiniLM(unittest.TestCase):
    def test_embeddings(self) -> None:
        texts = sentences()
        self.assertEqual(len(texts), 160)
        expected = {name: embed.embed(*embed.load(name), texts) for name in ("eager", "sdpa")}
        alike = expected["eager"] @ expected["eager"].T
        alike.fill_diagonal_(-1)
        best = alike.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-5
        self.assertGreater(int(clear.sum()), 150)
        for backend in BACKENDS:
            with self.subTest(backend=backend):
                integration.register(backend=backend)
                ours = embed.embed(*embed.load("libattn"), texts)
                for name, theirs in expected.items():
                    worst = float((ours * theirs).sum(-1).min())
                    print(f"{backend} and {name}: least cosine {worst:.8f}", end=" ")
                    self.assertGreaterEqual(worst, COSINE)
                    self.assertLess(float((ours - theirs).abs().max()), 1e-5)
                mine = ours @ ours.T
                mine.fill_diagonal_(-1)
                self.assertTrue(torch.equal(mine.argmax(-1)[clear], best.indices[clear, 0]))
                self.assertEqual([(r.index, r.kind, r.prefill.split("@")[0]) for r in integration.table()],
                                 [(i, "encoder_only", backend) for i in range(6)])

    def test_script_prints_embeddings_and_the_table(self) -> None:
        environment = {**os.environ, "ATTN_BACKEND": "layers.0-2=cpu_ref"}
        environment.pop("PYTHONPATH")
        output = subprocess.run([sys.executable, embed.__file__, "One sentence.", "Another."], env=environment,
                                check=True, capture_output=True, text=True).stdout
        self.assertEqual(len(re.findall(r"^\[[+-]0\.\d{4}, ", output, flags=re.M)), 2)
        rows = re.findall(r"^ +(\d)  encoder_only +(\S+) +(\S+)$", output, flags=re.M)
        self.assertEqual([(int(i), b.split("@")[0]) for i, b, _ in rows],
                         [(i, "cpu_ref" if i < 3 else "cpu_simd") for i in range(6)])
        self.assertEqual([r for _, _, r in rows], ["layers.0-2=cpu_ref"] * 3 + ["(rank)"] * 3)
