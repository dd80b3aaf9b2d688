"""One rank that asks the main one for what cannot be sent: `python ranks_process.py`, ranks by torch's variables.

Prints what each call came to, a line of JSON each: the error's type and message, or null and the value.
"""

import json
import sys
from types import ModuleType

import torch
from accelerate import Accelerator

from sparring.backend.trainer.ranks import Ranks
from sparring.errors import BudgetExhausted, EngineError


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.handle = lambda: None


class Garbled(Exception):
    """Would be made anew from its message, and say it twice."""

    def __init__(self, code):
        super().__init__(f"the code is {code}")


def main() -> None:
    ranks = Ranks(Accelerator(cpu=True), None)

    def failing(error):
        def make():
            raise error

        return make

    def of_a_plugin():
        """Its module was loaded from a file, by the main rank alone."""
        module = sys.modules["plugin"] = ModuleType("plugin")
        exec("class Strange(Exception): pass", vars(module))
        raise module.Strange("of a plugin")

    calls = [
        failing(EngineError("sent as it is")),
        failing(Unpicklable("not to be sent")),
        failing(BudgetExhausted("not to be made anew", stop_reason="max_turns")),
        failing(Garbled(7)),
        of_a_plugin,
        lambda: lambda: None,  # a value that cannot be sent
        lambda: ["a value"],
    ]
    for make in calls:
        try:
            came = (None, ranks.from_main(make))
        except Exception as error:
            came = (type(error).__name__, str(error))
        print(json.dumps(came), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
