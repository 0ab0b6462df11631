"""What a running vLLM or SGLang server accepts of its drafter, prompt by prompt, in its own count.

vLLM counts on its metrics page, so the page is read before and after every answer and nobody else may use the server
meanwhile. SGLang says with every answer how many of its steps accepted 0, 1, ... drafted tokens. Neither tells the
order of the steps: those of an answer are listed with the longest first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import requests

from data_prep.errors import UserError
from data_prep.sampling import Sampling
from data_prep.servers import Misconfigured, Refused, Reply, Server, Unavailable
from data_prep.servers import Settings as Asked
from pipeline.speculate import Generation, Seconds, Step

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
PER_SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Names of SGLang's histogram in `meta_info`, the newer one first.
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
TIMEOUT = 600  # seconds that an answer may take

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+\w.]+)")
_POSITION = re.compile(r'position="(\d+)"')


class Engine:
    """A server at `url` (ending in /v1) that drafts `block_size` - 1 tokens a step with the drafter under test, and the
    settings it is asked with."""

    def __init__(
        self,
        kind: str,
        url: str,
        target: Path,
        block_size: int,
        stop_token_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        ignore_eos: bool,
    ):
        sampling = Sampling(temperature, top_p=1.0, top_k=0, seed=0) if temperature > 0 else None
        self.server = Server(url, target, Asked(max_new_tokens, list(stop_token_ids), sampling, ignore_eos), TIMEOUT)
        if self.server.is_sglang != (kind == "sglang"):
            raise UserError(
                f"--engine {kind}, but {url} says it is {'sglang' if self.server.is_sglang else 'another engine'}; "
                "name the engine that runs there"
            )
        self.session, self.block_size = requests.Session(), block_size
        self.metrics_url = f"{self.server.url.removesuffix('/v1')}/metrics"
        if not self.server.is_sglang:
            self._vllm_counts()

    def answer(self, prompt: list[int], seed: int) -> Generation:
        """One answer with its steps. The whole time of the request counts as `verify`."""
        before = None if self.server.is_sglang else self._vllm_counts()
        begin = time.perf_counter()
        try:
            reply = self.server.ask(self.session, prompt, seed)
        except (Refused, Misconfigured, Unavailable) as error:
            raise UserError(
                f"{self.server.url} does not answer ({error}); finished prompts are kept: run the same command again "
                "when it does"
            ) from error
        seconds = Seconds(verify=time.perf_counter() - begin)
        if reply.ids is None:
            raise UserError(f"{self.server.url} returns no token ids; serve with an engine version that does")
        counts = self._histogram(reply) if self.server.is_sglang else self._counted(before, self._vllm_counts(), reply)
        steps = [
            Step(self.block_size - 1, accepted)
            for accepted in range(len(counts) - 1, -1, -1)
            for _ in range(counts[accepted])
        ]
        return Generation(reply.ids, steps, seconds)

    def _vllm_counts(self) -> tuple[int, int, list[int]]:
        """(drafts, drafted tokens, accepted tokens of slot 1, 2, ...) since the server's start, over all its
        engines."""
        try:
            page = self.session.get(self.metrics_url, headers=self.server.headers, timeout=60)
            page.raise_for_status()
        except requests.RequestException as error:
            raise UserError(
                f"GET {self.metrics_url} fails ({error}); --url is the address of the server's API, such as "
                "http://node1:8000/v1, and its metrics lie beside it"
            ) from error
        drafts = drafted = 0
        slots: dict[int, int] = {}
        known = False
        for name, labels, value in samples(page.text):
            known |= name == DRAFTS
            if name == DRAFTS:
                drafts += int(value)
            elif name == DRAFTED:
                drafted += int(value)
            elif name == PER_SLOT:
                slot = int(_POSITION.search(labels)[1])
                slots[slot] = slots.get(slot, 0) + int(value)
        if not known:
            raise UserError(
                f"{self.metrics_url} has no {DRAFTS}: the server runs without a drafter; start it with "
                "--speculative-config (README, Serving)"
            )
        return drafts, drafted, [slots[slot] for slot in sorted(slots)]

    def _counted(
        self, before: tuple[int, int, list[int]], after: tuple[int, int, list[int]], reply: Reply
    ) -> list[int]:
        """How many steps accepted 0, 1, ... tokens between two readings. Accepting is cumulative over the slots."""
        drafts, drafted = after[0] - before[0], after[1] - before[1]
        if drafted != drafts * (self.block_size - 1):
            raise UserError(
                f"{self.server.url} drafts {drafted / drafts:g} tokens a step, the drafter's block of {self.block_size}"
                f" has {self.block_size - 1}: start it with num_speculative_tokens {self.block_size - 1}"
            )
        reached = [drafts, *(now - then for now, then in zip(after[2], before[2], strict=True)), 0]
        counts = [here - further for here, further in zip(reached, reached[1:])]
        # The first token belongs to no step, and of the last step's tokens at least one is in the answer.
        emitted, longest = drafts + sum(reached[1:]), max((n + 1 for n, steps in enumerate(counts) if steps), default=1)
        if not emitted + 2 - longest <= len(reply.ids) <= emitted + 1:
            raise UserError(
                f"{self.server.url} counted {drafts} steps that emit {emitted} tokens, its answer has {len(reply.ids)}:"
                " somebody else uses it meanwhile; it has to be asked by this process alone"
            )
        return counts

    def _histogram(self, reply: Reply) -> list[int]:
        """How many steps accepted 0, 1, ... tokens, from the answer itself."""
        histogram = next((reply.meta[name] for name in HISTOGRAMS if name in reply.meta), None)
        if histogram is None and len(reply.ids) > 1:
            raise UserError(
                f"{self.server.url} answers without {' or '.join(HISTOGRAMS)}: it runs without a drafter, or is too old"
                " to say what it accepted; start it with --speculative-algorithm DFLASH, or update it"
            )
        return histogram or []


def samples(page: str):
    """(name, labels, value) of every sample of a Prometheus page."""
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            yield found[1], found[2] or "", float(found[3])
