"""A confined child process of SplitUp whose task turned out to be hostile code.

``python -m tests.sandbox.hostile_child MODULE FUNCTION TARGET``: the module's own main function,
after what would answer the first question has been taken over.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.sandbox import attempts

if __name__ == "__main__":
    name, function, target = sys.argv[1:]
    module = importlib.import_module(name)
    owner, _, attribute = f".{function}".rpartition(".")
    place = getattr(module, owner[1:]) if owner else module

    def attack(*_: Any) -> Any:
        return {"reached": attempts.try_all(json.loads(target))}, ()

    setattr(place, attribute, attack)
    sys.argv[1:] = [str(2**32)]  # the tokenizer's memory
    module.main()
