"""Prompts that are nearly the same: MinHash finds candidates, the exact share of common word 3-grams decides.

Broder, On the resemblance and containment of documents (1997); the index is datasketch's MinHashLSH. Cost at 50 words:
about 0.3 ms and 1.1 kB per prompt; only prompts that share a bucket with another one enter the index.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from datasketch import MinHash, MinHashLSH
from datasketch.hashfunc import sha1_hash32
from tqdm import tqdm

WORDS_PER_SHINGLE = 3
PERMUTATIONS = 256
RECALL = 0.995  # of pairs exactly at the threshold; more similar ones are missed far less often
SLACK = 0.15  # six standard deviations of a similarity that is estimated from 256 permutations

# Words, the signs that make another formula of the same numbers, and the signs of Chinese and Japanese one by one: these
# are written without blanks.
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORDS = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[-+*/=<>^%&|~]")


def shingles(text: str) -> frozenset[str]:
    """The distinct word 3-grams of `text` in lower case. Blanks beyond both ends count as words, so that another first
    or last word changes three 3-grams, as one in the middle does, and texts of one word have some too.
    """
    words = ["", "", *(_WORDS.findall(text.lower()) or [text.strip()]), "", ""]
    return frozenset(" ".join(words[i : i + WORDS_PER_SHINGLE]) for i in range(len(words) - WORDS_PER_SHINGLE + 1))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Share of what both have in what either has."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def band_shape(similarity: float) -> tuple[int, int]:
    """(bands, rows of a band) of the index: as many rows as still let RECALL of the pairs at `similarity` share a band.

    Every row more means fewer candidates that the exact comparison has to refuse.
    """
    shapes = [(PERMUTATIONS // rows, rows) for rows in range(1, PERMUTATIONS // 2 + 1)]
    enough = [(bands, rows) for bands, rows in shapes if 1 - (1 - similarity**rows) ** bands >= RECALL]
    return enough[-1] if enough else shapes[0]


def _signatures(keys: list[str], texts_of: Callable[[str], tuple[str, str]]) -> np.ndarray:
    """uint32 [prompts, PERMUTATIONS]: even columns are MinHash values of the first text, odd ones of the second.

    Every band then holds values of both, so only pairs that are alike in both texts share one.
    """
    first, second = (MinHash(PERMUTATIONS // 2, seed=seed, hashfunc=int) for seed in (1, 2))
    signatures = np.empty((len(keys), PERMUTATIONS), np.uint32)
    for row, key in enumerate(tqdm(keys, desc="hashing 3-grams", unit=" prompts")):
        one, other = texts_of(key)
        hashes = [sha1_hash32(shingle.encode("utf-8")) for shingle in shingles(one)]
        for offset, empty in enumerate((first, second)):
            if offset and other != one:
                hashes = [sha1_hash32(shingle.encode("utf-8")) for shingle in shingles(other)]
            minhash = empty.copy()
            minhash.update_batch(hashes)
            signatures[row, offset::2] = minhash.hashvalues
    return signatures


def _sharing(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Ascending rows of `signatures` that share a band with another row: the index takes 10 kB a prompt, most are spared
    it.
    """
    odd = np.random.default_rng(0).integers(0, 2**63, rows, dtype=np.uint64) | np.uint64(1)
    shares = np.zeros(len(signatures), bool)
    for band in tqdm(range(bands), desc="finding candidates", unit=" bands"):
        # A band's values folded into one number: two that collide only cost an entry in the index.
        folded = (signatures[:, band * rows : (band + 1) * rows] * odd).sum(axis=1, dtype=np.uint64)
        _, place, count = np.unique(folded, return_inverse=True, return_counts=True)
        shares |= count[place] > 1
    return np.flatnonzero(shares)


def near_duplicates(
    prompts: Mapping[str, Any], texts: Callable[[Any], tuple[str, str]], similarity: float
) -> dict[str, tuple[str, float]]:
    """The keys to drop, each with the key of a prompt that stays and their similarity, so that no two prompts that stay
    have a similarity of `similarity` (0 to 1) or more.

    `texts` gives the two texts of a prompt; the similarity of two prompts is the smaller of those of their texts.
    Prompts are gone through in the order of their keys, so the order of `prompts` does not matter.
    """
    keys = sorted(prompts)

    def texts_of(key: str) -> tuple[str, str]:
        return texts(prompts[key])

    @lru_cache(10_000)
    def shingles_of(key: str) -> tuple[frozenset[str], frozenset[str]]:
        one, other = texts_of(key)
        return shingles(one), shingles(other)

    bands, rows = band_shape(similarity)
    signatures = _signatures(keys, texts_of)
    index = MinHashLSH(num_perm=PERMUTATIONS, params=(bands, rows))
    entry = MinHash(PERMUTATIONS)
    dropped: dict[str, tuple[str, float]] = {}
    for row in tqdm(_sharing(signatures, bands, rows).tolist(), desc="comparing", unit=" prompts"):
        entry.hashvalues = signatures[row]
        candidates = np.array(sorted(index.query(entry)), dtype=np.int64)
        estimates = (signatures[candidates] == signatures[row]).mean(axis=1)
        for candidate in candidates[estimates >= similarity - SLACK].tolist():
            pairs = zip(shingles_of(keys[row]), shingles_of(keys[candidate]))
            share = min(jaccard(one, other) for one, other in pairs)
            if share >= similarity:
                dropped[keys[row]] = (keys[candidate], share)
                break
        else:
            index.insert(row, entry)
    return dropped
