# SPDX-License-Identifier: Apache-2.0
"""Masks become requests that mean the same mask, and only those that can."""
import unittest

import numpy as np
import torch

import libattn
from libattn.torch.segments import Segments, _counted, intervals, of_mask, whole


def causal_mask(queries: int, keys: int) -> np.ndarray:
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries


def band(queries: int, keys: int, left: int, right: int) -> np.ndarray:
    distance = np.arange(keys)[None] - (np.arange(queries)[:, None] + keys - queries)
    return (distance >= -left) & (distance <= right)


def rebuild(segments: Segments, batch: int, queries: int, keys: int) -> np.ndarray:
    """The mask [B, S, L] that the requests mean."""
    visible = np.zeros((batch, queries, keys), dtype=bool)
    left, right = segments.window or (-1, -1)
    for b, row, row_end, key, key_end in segments.requests.tolist():
        count, length = row_end - row, key_end - key
        place = np.arange(length - count, length)[:, None]
        j = np.arange(length)[None]
        seen = (j <= place) if segments.causal else np.ones((count, length), dtype=bool)
        seen &= (j >= place - left) if left >= 0 else True
        seen &= (j <= place + right) if right >= 0 and not segments.causal else True
        visible[b, row:row_end, key:key_end] |= seen
    return visible


class OfMask(unittest.TestCase):
    def check(self, mask: np.ndarray, causal: bool, window: tuple[int, int] | None = None, own: bool = True,
              most: int | None = None) -> None:
        segments = of_mask(torch.from_numpy(mask), causal, window, own)
        batch, queries, keys = mask.shape
        expected = mask.copy()
        if own and queries == keys:
            expected[np.repeat(~mask.any(1)[:, :, None], keys, 2)] = False
        np.testing.assert_array_equal(rebuild(segments, batch, queries, keys), expected)
        rows = [(int(b), r) for b, first, end, _, _ in segments.requests for r in range(first, end)]
        self.assertEqual(len(rows), len(set(rows)))
        self.assertEqual(segments.complete, len(rows) == batch * queries)
        if most is not None:
            self.assertLessEqual(len(segments.requests), most)

    def test_rows_are_counted_alike_by_torch(self) -> None:
        """By torch's operators, which masks on the CPU do not take; a row with a gap has fewer keys than its first and end say."""
        first, length = (torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(seed))[..., None] for seed in (1, 2))
        mask = (torch.arange(16) >= first) & (torch.arange(16) < first + length)
        count, *found = _counted(mask, 16).numpy()
        np.testing.assert_array_equal(found, intervals(mask))
        np.testing.assert_array_equal(count, length[..., 0])
        gap = torch.zeros(1, 1, 16, dtype=torch.bool)
        gap[..., [3, 4, 9]] = True
        np.testing.assert_array_equal(_counted(gap, 16).flatten(), [3, 3, 10])

    def test_causal(self) -> None:
        self.check(causal_mask(7, 7)[None], True, most=1)
        self.check(causal_mask(3, 9)[None], True, most=1)

    def test_padding_on_either_side(self) -> None:
        left, right = causal_mask(8, 8).copy(), causal_mask(8, 8).copy()
        left[:, :3] = False
        right[:, 5:] = False
        self.check(np.stack([left, right, causal_mask(8, 8)]), True, most=3)

    def test_static_cache(self) -> None:
        mask = np.zeros((2, 4, 32), dtype=bool)
        mask[:, :, :10] = causal_mask(4, 10)
        mask[1, :, :2] = False
        self.check(mask, True, most=2)

    def test_decode(self) -> None:
        mask = np.zeros((3, 1, 20), dtype=bool)
        mask[0, 0, 4:18], mask[1, 0, :18], mask[2, 0, 17] = True, True, True
        self.check(mask, True, most=3)

    def test_sliding_window(self) -> None:
        mask = causal_mask(12, 12) & band(12, 12, 4, 0)
        self.check(mask[None], True, (4, 0), most=1)
        self.check(mask[None], True, None, most=1)  # the mask shows it
        padded = mask.copy()
        padded[:, :5] = False
        self.check(padded[None], True, (4, 0), most=1)

    def test_symmetric_window_with_padding(self) -> None:
        mask = band(12, 12, 3, 3)
        self.check(mask[None], False, (3, 3), most=1)
        right = mask.copy()
        right[:, 8:] = False
        self.check(np.stack([mask, right]), False, (3, 3), most=2)
        self.check(np.stack([mask, right]), False, None, most=2)

    def test_encoder_padding(self) -> None:
        mask = np.ones((2, 6, 6), dtype=bool)
        mask[0, :, 4:] = False
        mask[1, :, :2] = False
        self.check(mask, False, most=2)

    def test_cross_keeps_every_row(self) -> None:
        mask = np.ones((1, 6, 6), dtype=bool)
        mask[0, :, 4:] = False
        self.check(mask, False, own=False, most=1)

    def test_packed_documents_and_chunks(self) -> None:
        document = np.repeat([0, 1, 2], [4, 1, 5])
        mask = causal_mask(10, 10) & (document[:, None] == document[None])
        self.check(mask[None], True, most=3)
        chunk = np.arange(10) // 4
        self.check((causal_mask(10, 10) & (chunk[:, None] == chunk[None]))[None], True, most=3)
        self.check((document[:, None] == document[None])[None], False, most=3)

    def test_prefix_and_images(self) -> None:
        mask = causal_mask(10, 10)
        mask[:4, :4] = True
        self.check(mask[None], True)
        sliding = causal_mask(12, 12) & band(12, 12, 5, 0)
        sliding[3:7, 3:7] = True
        self.check(sliding[None], True, (5, 0))

    def test_random_runs(self) -> None:
        random = np.random.default_rng(1)
        for _ in range(200):
            batch, queries, keys = random.integers(1, 4), random.integers(1, 9), random.integers(1, 12)
            first = random.integers(0, keys, (batch, queries))
            end = np.minimum(keys, first + random.integers(0, keys + 1, (batch, queries)))
            place = np.arange(keys)
            mask = (place >= first[..., None]) & (place < end[..., None])
            for causal in (False, True):
                self.check(mask, causal, random.choice([None, 1]) and (int(random.integers(0, 5)), 0), own=False)

    def test_gaps_are_refused_with_the_row(self) -> None:
        mask = causal_mask(6, 6)[None].copy()
        mask[0, 4, 2] = False
        with self.assertRaisesRegex(libattn.UnsupportedError, "attention_mask: row 4 of batch entry 0 sees 4 keys"):
            of_mask(torch.from_numpy(mask), True, None, True)

    def test_whole(self) -> None:
        np.testing.assert_array_equal(rebuild(whole(2, 3, 5, True, None), 2, 3, 5), np.stack([causal_mask(3, 5)] * 2))
