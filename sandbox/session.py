"""A shell that lives from call to call inside a sandbox.

A supervisor, itself a shell script, runs inside and reads one line an order from its standard input: `R` hands a line
to the working bash, `K` kills what that bash runs in the foreground. So a hung command is killed from inside, by the
same user, at the process limit too (everything in the supervisor is a builtin), and at once on every backend.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from sparring.sandbox.live import Session

if TYPE_CHECKING:
    from sparring.sandbox.command import ExecResult
    from sparring.sandbox.core import Sandbox

__all__ = ["ShellSession"]

# The working bash is interactive, though without a terminal, because only then SIGINT brings it back from a loop of
# builtins to its next line. What it runs gets fresh copies of both outputs (8 and 9), so that `exec >file` ends with
# the command and the end mark is always seen.
_SUPERVISOR = r"""
exec 8>&1 9>&2
exec 3> >(PS1= PS2= bash --norc --noprofile --noediting -i; code=$?; kill -USR1 $$; exit $code)
wrapper=$!
trap 'wait "$wrapper"; exit $?' USR1
keep=
children() { kids=; read -r kids < /proc/$1/task/$1/children; }
find_shell() { children "$wrapper"; shell=${kids%% *}; }
sweep() {
  local kids kid
  children "$1"
  for kid in $kids; do
    case " $2 " in *" $kid "*) ;; *) sweep "$kid" ""; kill -9 "$kid" ;; esac
  done
}
while IFS= read -r order; do
  case $order in
    R*) find_shell; children "$shell"; keep=$kids; printf '%s\n' "${order#R}" >&3 ;;
    E*) printf '%s\n' "${order#E}" >&3 ;;
    K*) find_shell; sweep "$shell" "$keep"; kill -INT "$shell" ;;
  esac
done 2>/dev/null
trap - USR1
sweep "$wrapper" ""
"""
# $1 is the mark. `export -p` is what a replaced shell is given back.
_SET_UP = (
    r"set +H +o history; _sparring_end() { local code=$?; printf '\036%s %d %q\n' $1 $code \"$PWD\" >&8; "
    r"printf '\036%s %d %q\n' $1 $code \"$PWD\" >&9; export -p >STATE; return $code; } 2>/dev/null; "
    r"if [ -r STATE ]; then . STATE; fi; cd -- CWD"
).replace('\\"', '"')
# What bash says of itself when a job of an interactive shell without a terminal dies of a signal.
_NOISE = re.compile(r"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: [^\n]*\n")


class ShellSession(Session):
    """A bash whose folder, variables, functions and background jobs live from call to call (`Sandbox.session`).

    A command that hangs is killed and the shell lives on. A shell that does not come back, or ends itself (`exit`), is
    replaced: the folder and the exported variables as of its last prompt are restored, the rest is lost.
    """

    name: ClassVar[str] = "bash"

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._cwd = "."  # quoted by the shell itself
        self._state = shlex.quote(f"{sandbox.scratch}/.sparring-session-{secrets.token_hex(4)}")

    async def exec(self, code: str, *, timeout_s: float = 30.0) -> ExecResult:
        result = await super().exec(code, timeout_s=timeout_s)
        return replace(result, stderr=_NOISE.sub("", result.stderr))

    def _argv(self) -> Sequence[str]:
        return ["bash", "--norc", "--noprofile", "-c", _SUPERVISOR, "supervisor"]

    def _preamble(self) -> bytes:
        return f"E{_SET_UP.replace('STATE', self._state).replace('CWD', self._cwd)}\n".encode()

    def _order(self, code: str, mark: str) -> bytes:
        return f"R{_line(code, mark)}".encode("utf-8", "replace")

    def _interruption(self, mark: str) -> bytes:
        return f"K\nE{_line('', mark)}".encode()

    def _ended(self, word: str) -> None:
        self._cwd = word


def _line(code: str, mark: str) -> str:
    return f"eval {_quoted(code)} </dev/null >&8 2>&9; _sparring_end {mark}\n"


def _quoted(text: str) -> str:
    """`text` as one line of bash, whatever is in it: $'...' quoting."""
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\x1e": "\\x1e"}
    return "$'" + "".join(escapes.get(character, character) for character in text) + "'"
