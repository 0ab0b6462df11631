"""One rank that runs the training command again and again in one process: starting Python and DeepSpeed takes longer than
a tiny run. Reads a JSON list of arguments per line, answers with the exit code; output goes to the file named first."""
import json
import os
import runpy
import sys
import traceback

from tests.distributed import ROOT


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that greet on import must not answer
    train = runpy.run_path(str(ROOT / "launch/train.py"), run_name="train")["main"]
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.argv = ["launch/train.py", *arguments]
        try:
            code = train()
        except SystemExit as exit_:
            code = exit_.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(f"{code}\n")
        answers.flush()


if __name__ == "__main__":
    main()
