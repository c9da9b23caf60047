"""Commands in processes that start at once: forked from one that has imported everything, with one
thread each.
"""

import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.helpers.command import environment


class Running:
    """Processes of one command, one for each rank.

    Args:
        server: forked them.
        pids: of the ranks.
        folder: where they run, and write `out0`, `out1`, ...
    """

    def __init__(self, server: "Server", pids: list[int], folder: Path) -> None:
        self.server = server
        self.pids = pids
        self.folder = folder

    def wait(self, ranks: slice = slice(None)) -> list[int]:
        """Exit codes, minus the signal if one killed it."""
        return self.server.ask({"wait": self.pids[ranks]})

    def kill(self, after: float = 0.0, ranks: slice = slice(None)) -> list[int]:
        """Kill after some seconds what still runs then; exit codes."""
        time.sleep(after)
        for pid in self.pids[ranks]:
            os.kill(pid, signal.SIGKILL)  # not waited for yet: the number is still theirs
        return self.wait(ranks)

    def output(self, rank: int = 0) -> str:
        return (self.folder / f"out{rank}").read_text()

    def errors(self) -> list[str]:
        """Error messages of all ranks."""
        lines = [line for rank in range(len(self.pids)) for line in self.output(rank).splitlines()]
        return [line for line in lines if line.startswith("error: ")]

    def wait_for(self, path: str, seconds: float = 60) -> None:
        """Wait until a file below the folder is there."""
        end = time.monotonic() + seconds
        while not (self.folder / path).exists():
            assert time.monotonic() < end, self.output()
            time.sleep(0.005)


def free_port() -> int:
    """A port that no process uses, other tests included."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


class Server:
    """Forks commands; they end at the latest when it does."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.forked"]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment(), text=True
        )
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def ask(self, job: dict[str, Any]) -> Any:
        """The answer to one line."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(
        self, line: str, folder: Path, task: str = "vit", before: str = "", ranks: int = 1
    ) -> Running:
        """Start `python -m tasks.TASK LINE` in `folder` after the Python code `before`, which may
        use `rank` and the functions of `tests.helpers.faults`.
        """
        job = {"line": shlex.split(line), "folder": str(folder), "task": task}
        job |= {"before": before, "ranks": ranks, "port": free_port()}
        return Running(self, self.ask(job), folder)

    def run(self, line: str, folder: Path, task: str = "vit", **options: Any) -> str:
        """Run it to its end, which must be good; what the first rank printed."""
        running = self.start(line, folder, task, **options)
        codes = running.wait()
        assert not any(codes), f"{codes}\n{running.output()}"
        return running.output()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


# The process that forks ---------------------------------------------------------------------------


def run_rank(job: dict[str, Any], rank: int) -> None:
    """Run a job's command as one of its ranks, and exit."""
    from tasks.cli.main import main
    from tests.helpers import faults

    os.setpgid(0, 0)
    os.chdir(job["folder"])
    out = os.open(f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if job["ranks"] > 1:  # as those that Lightning launches
        os.environ |= {"TESSERA_RUN_DIR": f"{job['folder']}/r", "LOCAL_RANK": str(rank)}
        os.environ |= {"NODE_RANK": "0", "WORLD_SIZE": str(job["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    code: Any = 1
    try:
        exec(job["before"], vars(faults) | {"rank": rank})
        code = main(importlib.import_module(f"tasks.{job['task']}.__main__").APP, job["line"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Fork the ranks of each job that standard input names."""
    from tasks.cli.lazy_imports import import_lightning

    import_lightning()
    import torch

    torch.set_num_threads(1)
    modules = [
        f"tasks.{task}.{part}"
        for task in ("vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq")
        for part in ("__main__", "task")
    ]
    modules += ["tasks.training.interruption", "matplotlib.figure", "tests.helpers.faults"]
    for module in modules:
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in job["wait"]]
        else:
            answer = []
            for rank in range(job["ranks"]):
                answer.append(os.fork())
                if answer[-1] == 0:
                    run_rank(job, rank)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
