"""Types into an interactive shell, as a person at a terminal does."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Mapping
from pathlib import Path

START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'bind -x \'"\\C-g": printf %s "$READLINE_LINE" > typed\''),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -Uz compinit; compinit -u -D; kept() { print -rn -- "$BUFFER" > typed };'
        " zle -N kept; bindkey '^G' kept",
    ),
}
"""Shell -> its command, and what makes ctrl-G write the line that is being typed into the file `typed`."""
WAIT_S = 20


def complete_typed(shell: str, script: str, line: str, folder: Path, env: Mapping[str, str]) -> str:
    """Return the line after TAB in a shell that has read `script`; the shell runs in `folder`."""
    command, setup = START[shell]
    (folder / "script").write_text(f"{setup}\n{script}\nprintf ready > ready\n")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**env, "TERM": "dumb", "PS1": "> "})
    try:
        _type(terminal, ". ./script\n", folder / "ready")
        _type(terminal, line + "\t\x07", folder / "typed")
        return (folder / "typed").read_text()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def _type(terminal: int, text: str, written: Path) -> None:
    """Type, and read what the shell prints until the file is there."""
    os.write(terminal, text.encode())
    deadline_s = time.monotonic() + WAIT_S
    while not (written.exists() and written.read_text()):
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)
        assert time.monotonic() < deadline_s, f"the shell has not answered to {text!r}"
