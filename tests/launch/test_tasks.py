"""Array tasks and the submission of the chain without a scheduler, on stand-ins (conftest.py)."""

import signal
import socket
import subprocess
import sys
import time

from tests.distributed import ROOT, free_port

from .conftest import write


def test_a_task_that_fails_names_its_node_and_keeps_its_exit_code(shell):
    write(shell.folder, "python", "exit 3")
    code, output = shell(
        "launch/slurm/extract.sbatch",
        "--num-tasks",
        "4",
        SLURM_JOB_ID="12",
        SLURM_ARRAY_JOB_ID="9",
        SLURM_ARRAY_TASK_ID="3",
        SLURMD_NODENAME="gpu-a02",
    )
    assert code == 3 and "exit code 3 on node gpu-a02" in output and "--num-tasks 4 --task-id 3" in output


def test_a_task_out_of_time_ends_its_command_and_requeues_itself(shell):
    write(shell.folder, "python", "trap 'touch ended; exit 143' TERM; touch ready; sleep 60 > /dev/null 2>&1 & wait")
    script = shell.start("launch/slurm/respond.sbatch", "--num-tasks", "4", SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    while not (shell.folder / "ready").exists():
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    output, _ = script.communicate(timeout=30)
    assert script.returncode == 75 and "the time limit is near: requeueing" in output
    assert (shell.folder / "requeued").read_text() == "12\n" and (shell.folder / "ended").exists()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_respond_starts_a_server_waits_for_it_and_ends_it(shell):
    port = int(free_port())
    (shell.folder / "site.env").write_text((shell.folder / "site.env").read_text().replace('SERVE=""', 'SERVE="serve"'))
    write(
        shell.folder,
        "serve",
        f"""echo "$*" > served; exec {sys.executable} -c '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()' "${{@: -1}}" """,
    )
    write(shell.folder, "python", 'echo "$*"; curl --fail --silent "${@: -3:1}" > reached && touch answered')
    code, output = shell(
        "launch/slurm/respond.sbatch",
        "--target",
        "/models/T",
        "--out",
        "r.jsonl",
        SLURM_JOB_ID=str(port - 15000),
        SLURM_ARRAY_TASK_ID="0",
        SLURMD_NODENAME="a",
    )
    served = (shell.folder / "served").read_text().split()
    assert code == 0 and served[:2] == ["/models/T", "--port"] and (shell.folder / "answered").exists(), output
    assert f"--server http://127.0.0.1:{served[2]}/v1 --task-id 0" in output
    deadline = time.monotonic() + 10
    while listens(int(served[2])):
        assert time.monotonic() < deadline, "the server is still there"
    write(shell.folder, "serve", "echo no GPU; exit 4")
    code, output = shell(
        "launch/slurm/respond.sbatch", "--target", "T", SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="0", SLURMD_NODENAME="a"
    )
    assert code == 1 and "the server on node a ended:\nno GPU" in output


def test_scripts_refuse_to_run_from_another_folder(shell):
    process = subprocess.run(
        ["bash", ROOT / "launch/slurm/merge.sbatch", "x"], cwd=shell.folder, capture_output=True, text=True
    )
    assert process.returncode != 0


def test_submit_prints_every_command_of_the_chain_with_its_dependency_and_submits_nothing(shell):
    write(shell.folder, "sbatch", "touch submitted")
    site = shell.folder / "site.env"
    site.write_text(
        site.read_text().replace(f"PYTHON={shell.folder}/bin/python", f"PYTHON={sys.executable}")
        + 'SITE_OPTIONS="--account=a" TRAIN_OPTIONS="--nodes=4" TASK_OPTIONS="--time=1" SMALL_OPTIONS="--mem=1G"\n'
        "RESPOND_TASKS=2 EXTRACT_TASKS=3 EVALUATE_TASKS=4\n"
    )
    code, output = shell(
        "launch/slurm/submit.sh",
        "launch/runs/smoke.yaml",
        f"out={shell.folder}",
        "optim.lr=1e-4",
        "--dry-run",
        "--template-args",
        '{"enable_thinking": false}',
        "--extract",
        "--storage fp8",
    )
    commands = dict((line.split("--job-name=")[1].split()[0], line) for line in output.splitlines())
    assert code == 0 and not (shell.folder / "submitted").exists(), output
    assert list(commands) == [
        "respond",
        "merge-responses",
        "extract",
        "merge-dataset",
        "train",
        "export",
        "evaluate",
        "collect",
    ]
    for name, before in zip(list(commands)[1:], commands):
        assert f"--dependency=afterok:\\<{before}\\> --kill-on-invalid-dep=yes" in commands[name]
    assert all("--account=a" in command for command in commands.values())
    assert (
        "--array=0-2" in commands["extract"]
        and "--num-tasks 3" in commands["extract"]
        and "--storage fp8" in commands["extract"]
    )
    assert "--nodes=4" in commands["train"] and commands["train"].endswith(f"out={shell.folder} optim.lr=1e-4")
    assert "--time=1 " in commands["collect"] and "--mem=1G" in commands["export"]  # collecting needs the GPU too
    assert "enable_thinking" in commands["respond"] and "enable_thinking" in commands["evaluate"]


def test_submit_refuses_what_it_does_not_know_and_prompts_that_are_not_there(shell):
    assert shell("launch/slurm/submit.sh")[0] == 2
    code, output = shell("launch/slurm/submit.sh", "launch/runs/smoke.yaml", "--prompt", "x")
    assert code == 2 and "unknown option --prompt" in output
    site = shell.folder / "site.env"
    site.write_text(site.read_text().replace(f"PYTHON={shell.folder}/bin/python", f"PYTHON={sys.executable}"))
    code, output = shell("launch/slurm/submit.sh", "launch/runs/smoke.yaml", f"out={shell.folder}")
    assert code == 2 and "no prompts in" in output
