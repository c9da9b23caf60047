"""The command `tessera TASK COMMAND`: `python -m tasks.TASK COMMAND` in any folder.

A folder with packages named tasks, modules or configs would hide ours from `python -m`.
"""

import sys
from importlib import import_module

from tasks.cli.app import TASKS, app


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    from tasks.cli.main import run_process
    from tasks.errors import UsageError, exit_status, unknown_name

    task = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if task in TASKS:
        return run_process(app(task), sys.argv[2:])
    if task == "lab":
        status_code: int = import_module("tasks.lab.__main__").main()
        return status_code
    with exit_status(debug=False) as status:
        if task == "completion":
            from tasks.cli.completion import completion

            print(completion(sys.argv[2:], [app(name) for name in TASKS]))
        elif task == "--version":
            print(version())
        elif task in ("-h", "--help", "help"):
            print(help_screen())
        else:
            raise UsageError(unknown_name(task, TASKS, "task"))
    return status.code


def version() -> str:
    from tasks import __version__

    return f"tessera {__version__}"


def help_screen() -> str:
    """The tasks, one a line."""
    titles = {task: app(task).title for task in TASKS}
    lines = [f"  {task:<9}{title.partition(': ')[2]}" for task, title in titles.items()]
    return "\n".join(
        [
            "Tessera: Transformers on PyTorch Lightning",
            "",
            "usage: tessera TASK COMMAND [options]",
            "",
            "tasks:",
            *lines,
            "",
            "more:",
            "  tessera lab --help            experiments of many runs",
            "  tessera TASK --help           the commands of a task",
            "  tessera TASK COMMAND --help   options of a command (--help all: every one)",
            "  tessera completion bash       a script for tab completion",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
