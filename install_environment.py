"""Install Paceline and its development tools into a virtual environment, and show the progress.

`make demo` and `make test` run it once per clone:

    python3 install_environment.py .venv

On a terminal pip draws its own progress bars. Elsewhere (CI, a log file) each download is one line,
and a line every few seconds counts the installed packages.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

PIP = "pip>=25.1"  # the first version that reads dependency groups
REQUIREMENTS = ("--editable", ".[agent,server]", "--group", "dev")
INTERVAL_SECONDS = 5.0  # between two lines while nothing is downloaded
FAILURE_LINES = 40  # last lines of pip's output, shown if it fails
PLAN = """\
Installing into {directory} with Python {version}; needed once, and after dependencies change.
  packages   about 115: PyTorch, the server's and the agent's libraries, test tools
  download   0.4 GB with a CPU build of PyTorch; several GB with the CUDA build, which is the
             default of PyPI on Linux x86_64. pip's cache and PIP_FIND_LINKS are used.
  disk       1.9 GB with the CPU build
  time       1 to 3 minutes plus the download"""

_DOWNLOAD = re.compile(r"\s*(Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+ [kMG]?B)\))?")


class InstallationProgress:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def show(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)


def main(directory: Path) -> int:
    """Create the environment and fill it. Return the exit status."""
    version = ".".join(map(str, sys.version_info[:3]))
    print(PLAN.format(directory=directory, version=version), flush=True)
    progress = InstallationProgress()
    progress.show(f"creating {directory}")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    progress.show(f"installing {PIP}")
    subprocess.run([*pip, "--quiet", "--upgrade", PIP], check=True)
    progress.show("resolving dependencies")
    command = [*pip, *REQUIREMENTS]
    is_terminal = sys.stdout.isatty()
    status = subprocess.run(command).returncode if is_terminal else run_plain(command, progress)
    if status:
        progress.show(f"pip failed with exit status {status}; fix its error and run make again")
    else:
        progress.show("installed")
    return status


def run_plain(command: list[str], progress: InstallationProgress) -> int:
    """Run pip without a terminal. Return its exit status."""
    environment = Path(command[0]).parents[1]
    stage = ["resolving dependencies"]
    finished = threading.Event()

    def show_stage() -> None:
        while not finished.wait(INTERVAL_SECONDS):
            if stage[0].startswith("installing"):
                count, newest = count_packages(environment)
                progress.show(f"{stage[0]}: {count} done, now {newest}")
            else:
                progress.show(f"still {stage[0]}")

    reporter = threading.Thread(target=show_stage, daemon=True)
    reporter.start()
    recent: deque[str] = deque(maxlen=FAILURE_LINES)
    with subprocess.Popen(
        [*command, "--progress-bar", "off"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            recent.append(line)
            if download := describe_download(line):
                stage[0] = download
                progress.show(download)
            elif line.startswith("Installing collected packages:"):
                stage[0] = f"installing {line.count(',') + 1} packages"
                progress.show(stage[0])
    finished.set()
    reporter.join()
    if process.returncode:
        print("".join(recent), end="", flush=True)
    return process.returncode


def describe_download(line: str) -> str | None:
    """Return the file that pip downloads, with its size; None for any other line."""
    match = _DOWNLOAD.match(line)
    if match is None or match[2].endswith((".metadata", "/")):
        return None
    action = "downloading" if match[1] == "Downloading" else "using local"
    name = match[2].rpartition("/")[2]
    package = "-".join(name.split("-")[:2])
    return f"{action} {package}" + (f" ({match[3]})" if match[3] else "")


def count_packages(environment: Path) -> tuple[int, str]:
    """Return how many packages are installed, and the one whose files are the newest."""
    changed: dict[str, float] = {}
    for entry in environment.glob("lib/python*/site-packages/[!_]*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves directories while it installs
            changed[entry.name] = entry.stat().st_mtime
    count = sum(name.endswith(".dist-info") for name in changed)
    newest = max(changed, key=changed.__getitem__, default="")
    return count, newest.partition("-")[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
