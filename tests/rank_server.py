"""Ranks that run the training command again and again: importing torch and DeepSpeed takes longer than a tiny run.

This process imports them once and forks a rank for every line it reads: a JSON list of the rank's environment and of two
FIFOs. It answers with the process id. A rank reads a JSON list of arguments per line from the first FIFO and writes the exit
code to the second; its output goes to the file that the list names first.
"""
import json
import os
import runpy
import signal
import sys
import traceback

from tests.distributed import ROOT


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print on import is no answer
    import pipeline.target_head  # noqa: F401  what the command imports late, imported here once for all ranks
    import pipeline.trainer  # noqa: F401

    train = runpy.run_path(str(ROOT / "launch/train.py"), run_name="train")["main"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that end leave no zombies
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(train, *json.loads(line))
            os._exit(0)
        print(pid, file=replies, flush=True)


def serve(train, environment: dict[str, str], commands: str, answers: str) -> None:
    os.environ.update(environment)
    with open(commands) as lines, open(answers, "w") as out:
        for line in lines:
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
            print(code, file=out, flush=True)


if __name__ == "__main__":
    main()
