"""A real vLLM server on 127.0.0.1, where its command is installed."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from tests.distributed import free_port

VLLM = shutil.which("vllm")
needs_vllm = pytest.mark.skipif(VLLM is None, reason="no vllm command on the PATH")

START_SECONDS = 300
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def vllm_server(model: Path, log: Path, *options: object):
    """(URL of its API, process) of a server of `model` in float32, once it answers."""
    port = free_port()
    # the module, not the command: the command of the CPU build looks for the metadata of a package of another name
    command = [Path(VLLM).with_name("python"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager", *map(str, options)]
    environment = os.environ | ENVIRONMENT
    environment.pop("PYTHONPATH", None)  # vLLM has its own versions of what this environment holds
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        for _ in range(START_SECONDS):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                requests.get(f"{url}/models", timeout=5)
                break
            except requests.RequestException:
                time.sleep(1)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
