"""The NumPy Philox that the oracle's dropout is compared with: checked against published figures."""

import numpy as np
import pytest

import strobe

from . import philox

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((FULL,) * 4, (FULL,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_random123_vectors(counter, key, words):
    assert tuple(int(w) for w in philox.philox4x32_7(counter, key)) == words


def test_bytes_of_the_documentation():
    assert philox.random_bytes((1, 1, 4, 8), 0, 0)[0, 0].tolist() == [
        [37, 15, 173, 170, 229, 173, 7, 181],
        [76, 130, 144, 174, 48, 248, 179, 136],
        [101, 232, 252, 115, 89, 3, 188, 40],
        [99, 235, 25, 168, 49, 82, 49, 255],
    ]


@pytest.mark.parametrize("dropout", [0.001, 0.1, 0.5, 127.5 / 256, 0.9, 0.999])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (42, 7), (2**64 - 1, 2**63)])
def test_dropout_mask(dropout, seed, offset):
    shape = (2, 3, 37, 53)
    kept = np.asarray(strobe.dropout_mask(shape, dropout, seed, offset))
    np.testing.assert_array_equal(kept, philox.keep(shape, dropout, seed, offset))
