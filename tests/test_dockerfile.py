"""What the Dockerfile runs, run here: there is no Docker where tests run."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = (ROOT / "Dockerfile").read_text("utf-8")
HERE = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "TRANSFORMER_LIB_DEVICE": "cpu",
}


def argument(instruction: str) -> str:
    """What follows an instruction, the last one of its name."""
    return re.findall(rf"(?m)^{instruction} (.*(?:\\\n.*)*)$", FILE)[-1]


def test_the_server_answers_and_is_healthy(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = json.loads(argument("ENTRYPOINT")) + json.loads(argument("CMD"))
    assert argument("EXPOSE") == "8000"
    health = argument("HEALTHCHECK").split(" CMD ")[1].replace("8000", port)
    with subprocess.Popen([*command, "--port", port], env=HERE, cwd=tmp_path) as server:
        try:
            for _ in range(600):
                well = subprocess.run(health, shell=True, env=HERE, capture_output=True)
                if well.returncode == 0 or server.poll() is not None:
                    break
                time.sleep(0.5)
        finally:
            server.terminate()
    assert well.returncode == 0, well.stderr.decode()
    done = subprocess.run(health, shell=True, env=HERE, capture_output=True)
    assert done.returncode  # nobody is there any more


def test_what_it_installs_is_named_by_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extra,) = re.findall(r"whl\)\[(\w+)\]", FILE)
    assert extra in project["optional-dependencies"]
    (python,) = set(re.findall(r"(?m)^FROM python:3\.(\d+)-slim", FILE))
    assert project["requires-python"] == ">=3.11" and int(python) >= 11


def test_what_it_copies_leaves_the_library_whole():
    left_out = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert left_out.index("**/runs") < left_out.index("!transformer_lib/runs")
    assert {"_build", ".venv", ".git"} <= set(left_out)
