"""Runs inside a sandbox, as `python3 -c`: reads cells as JSON lines, runs them in one namespace, marks their end.

An order is {"code", "mark"} or {"interrupt": true, "mark"}; a bare {"exit": true} ends the process at once. Standard
library alone; nothing of sparring is there.
"""

import ast
import json
import linecache
import os
import queue
import signal
import sys
import threading
import traceback

orders = os.fdopen(os.dup(0), "rb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
outputs = [os.dup(1), os.dup(2)]
cells: queue.SimpleQueue[dict] = queue.SimpleQueue()
main = threading.get_ident()
namespace = {"__name__": "__main__", "__builtins__": __builtins__}


def listen():
    for line in orders:
        order = json.loads(line)
        if order.get("exit"):
            break
        if order.get("interrupt"):
            signal.pthread_kill(main, signal.SIGINT)
        cells.put(order)
    os._exit(137)


def run(code, name):
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


threading.Thread(target=listen, daemon=True).start()
count = 0
while True:
    try:
        order = cells.get()
        code = 130
        if "code" in order:
            count += 1
            code = run(order["code"], f"<cell {count}>")
        flush()
        mark = b"\x1e%s %d -\n" % (order["mark"].encode(), code & 0xFF)
        for output in outputs:
            os.write(output, mark)
    except KeyboardInterrupt:  # an interrupt that came after its cell had ended
        pass
