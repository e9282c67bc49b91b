"""`growprune`, and `python -m growprune`: the command line, and what ends it where no run is going on.

To load all that it needs takes seconds, torch most of them; Ctrl-C and SIGTERM end those in one line too.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def main() -> NoReturn:
    """The entry point."""
    if "RANK" not in os.environ:  # torchrun ends its processes itself, and says so
        for number, usual in USUAL.items():
            if signal.getsignal(number) is usual:  # not ignored, as in the background of a script
                signal.signal(number, end)
    from growprune import cli

    try:
        cli.main()
    finally:
        for number in USUAL:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def end(number: int, _: Any) -> NoReturn:
    """Hears them but while a run does (`jobs.heeding`).

    What is being loaded may swallow what is raised here, or make a traceback of it; so it is left at once until torch
    is there: nothing can have begun before.
    """
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        with suppress(OSError):
            os.write(2, b"growprune: interrupted\n")
        os._exit(128 + number)
    from growprune.errors import EndedError

    raise EndedError(number)


if __name__ == "__main__":
    main()
