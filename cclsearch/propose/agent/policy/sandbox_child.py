"""The process that runs a program: started with `python -I`, a task on stdin, an answer on stdout.

It imports no other module of this package and inherits no environment. The interpreter (pydantic-monty) runs in a
further process.
"""

import ast
import contextlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

ADDRESS_SPACE_BYTES = 4 * 2**30


def confine(limits: dict[str, Any]) -> None:
    """Set hard limits of the operating system, in case the interpreter's own fail."""
    cpu_s = int(2 * limits["time_s"]) + 10
    wanted = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: ADDRESS_SPACE_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for what, limit in wanted.items():
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, limit))


LISTS_AT_ONCE = {"filter", "map", "zip", "enumerate", "reversed"}
"""Functions that return a list in this interpreter instead of an iterator, as generator expressions do."""


def parse(program: str) -> ast.Module | None:
    """The program's syntax tree; None if this Python cannot parse it (the interpreter may, or reports the error)."""
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def prepare(program: str, tree: ast.Module | None) -> str:
    """Return the program as for an import, changed so that `next(x for x in y)` gets an iterator.

    Code under `if __name__ == "__main__":` is left out; line numbers stay the same.
    """
    if tree is None:
        return program
    lines = [line.encode() for line in program.split("\n")]
    inserts: list[tuple[int, int, bytes]] = []
    for node in _nodes_in_place(tree):
        if isinstance(node, ast.Call) and _is_next_of_list(node):
            given = node.args[0]
            # A generator expression as the only argument shares its parentheses with the call.
            shares = given.col_offset == node.func.end_col_offset and given.lineno == node.func.end_lineno
            inserts.append((given.lineno, given.col_offset, b"(iter" if shares else b"iter("))
            inserts.append((given.end_lineno or 0, given.end_col_offset or 0, b")"))
    for number, column, text in sorted(inserts, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:column] + text + line[column:]
    for statement in tree.body:
        if _asks_for_main(statement):
            for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                lines[number - 1] = b"pass" if number == statement.lineno else b""
    return b"\n".join(lines).decode()


def _nodes_in_place(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes except those inside f-strings."""
    # Python 3.11 gives no positions inside f-strings.
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.JoinedStr):
            yield node
            pending += ast.iter_child_nodes(node)


def _is_next_of_list(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Name) and call.func.id == "next" and call.args):
        return False
    given = call.args[0]
    is_list = isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id in LISTS_AT_ONCE
    return is_list or isinstance(given, ast.GeneratorExp)


def _asks_for_main(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare) and not statement.orelse):
        return False
    sides = (statement.test.left, *statement.test.comparators)
    names = [side.id if isinstance(side, ast.Name) else getattr(side, "value", None) for side in sides]
    return names in (["__name__", "__main__"], ["__main__", "__name__"]) and isinstance(statement.test.ops[0], ast.Eq)


CORRECT = "correct"
"""Function of a program that corrects a prediction; the other kind chooses a configuration."""
CALL_CORRECT = """
_totals = []
for _config, _parts in rows:
    _found = correct(_config, _parts, card)
    _totals.append([sum(_found["time"].values()), sum(_found["memory"].values())])
_json.dumps(_totals)
"""


def lacks(name: str, tree: ast.Module | None) -> bool:
    """Whether the module defines no function of that name; False without a tree, as the run will show it."""
    if tree is None:
        return False
    found = (getattr(node, name, "") for node in ast.walk(tree) for name in ("name", "id", "asname"))
    return name not in found


def write_call(program: str, tree: ast.Module | None) -> str:
    """Return source text that calls `generate_config` with the arguments that it accepts."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    found = next((node for node in reversed(functions) if node.name == "generate_config"), None)
    given = "workload, environment" + _history_of(program) if found is None else _arguments_of(found.args)
    return f"import json as _json\n_json.dumps(generate_config({given}))"


def _history_of(program: str) -> str:
    head = re.search(r"def\s+generate_config\s*\(([^)]*)", program)
    return ", history" if head and re.search(r"\bhistory\b", head.group(1)) else ""


def _arguments_of(takes: ast.arguments) -> str:
    """The arguments by name, as the reference calls it; by position if the parameters have other names."""
    named = {argument.arg for argument in (*takes.args, *takes.kwonlyargs)}
    if {"workload", "environment"} <= named:
        more = ", history=history" if "history" in named else ""
        return f"workload=workload, environment=environment{more}"
    placed = [*takes.posonlyargs, *takes.args]
    needed = len(placed) - len(takes.defaults)
    takes_third = len(placed) > 2 and (needed > 2 or placed[2].arg == "history")
    return "workload, environment" + (", history" if takes_third else "")


def run(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task: a result as JSON text, or an error message."""
    import pydantic_monty as monty

    limits = task["limits"]
    program = task["program"].replace("\r\n", "\n").replace("\r", "\n")
    tree, name = parse(program), task["signature"].partition("(")[0]
    if lacks(name, tree):
        return {"error": f"the program defines no function {task['signature']}"}
    resources = {
        "max_feed_duration_secs": limits["time_s"],
        "max_memory": limits["memory_bytes"],
        "max_recursion_depth": limits["recursion"],
        "max_suspensions": 50,
        "max_total_sleep_secs": 0.1,
    }
    policy = {"random_start": {"seed": 0}, "sleep": "zero"}
    printed = monty.CollectString(max_bytes=limits["output_bytes"])
    pool = monty.Monty(request_timeout=2 * limits["time_s"] + 5, max_processes=1)
    try:
        with pool, pool.checkout(limits=resources, os_policy=policy, script_name="policy.py") as session:
            session.feed_run(prepare(program, tree), inputs=task["inputs"], print_callback=printed)
            call = f"import json as _json\n{CALL_CORRECT}" if name == CORRECT else write_call(program, tree)
            text = session.feed_run(call, print_callback=printed)
    except monty.MontyCrashedError:
        return {"error": "the program exceeded the memory or time limit, and its interpreter was stopped"}
    except monty.MontyError as error:
        return {"error": describe_error(error)}
    if not isinstance(text, str):
        return {"error": f"{name} must return a dict"}
    if len(text) > limits["output_bytes"]:
        return {"error": f"{name} returned more than {limits['output_bytes']:,} characters"}
    return {"result": text}


def describe_error(error: Exception) -> str:
    """The error with its traceback, bounded."""
    show = getattr(error, "display", None)
    text = str(show("traceback")) if show else str(error)
    return text if len(text) <= 4000 else text[:1500] + "\n...\n" + text[-2000:]


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    confine(task["limits"])
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        answer = run(task)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
