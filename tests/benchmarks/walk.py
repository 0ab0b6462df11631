"""What `--walk` saves: seconds of the drafting loop and of the walk over the same prompts, which count the same steps.

    python tests/benchmarks/walk.py --target runs/quickstart/target --drafter runs/quickstart/drafter \
        --prompts runs/quickstart/prompts/heldout.jsonl

Timed in one process, round after round: the loop, the walk from nothing (texts, states, steps), and the walk of another
drafter over the same texts, as in an ablation. Prints the best round of each as a share of the loop's.
"""

import argparse
import time
from pathlib import Path

import torch

from pipeline.evaluation_target import EvaluationTarget, Settings
from pipeline.prompts import read_conversations
from pipeline.replay import Responder, replay
from pipeline.speculate import Generation, generate_drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="F.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="prompts (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = EvaluationTarget(args.target, Settings(args.max_new_tokens))
    model, drafter, stops = target.model, target.drafter(args.drafter), set(target.stop_token_ids)
    prompts = [target.prompt(conversation, []) for conversation in read_conversations([args.prompts], args.limit)]
    layer_ids, block_size = drafter.config.target_layer_ids, drafter.config.block_size

    def loop() -> list[Generation]:
        return [generate_drafted(model, drafter, prompt, args.max_new_tokens, stops) for prompt in prompts]

    def walk() -> list[Generation]:
        return [replay(model, drafter, text) for text in responder.texts(prompts, layer_ids, block_size)]

    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        responder = Responder(model, args.max_new_tokens, stops)
        steps = []
        for name, run in (("loop", loop), ("walk", walk), ("another drafter", walk)):
            began = time.perf_counter()
            steps.append([generation.steps for generation in run()])
            seconds.setdefault(name, []).append(time.perf_counter() - began)
        assert steps[1:] == steps[:-1], "loop and walk count different steps"
    for name, times in seconds.items():
        print(f"{name:<16} {min(times):8.2f} s  {min(times) / min(seconds['loop']):6.3f} of the loop")


if __name__ == "__main__":
    main()
