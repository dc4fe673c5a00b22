"""How a command of the examples ends."""

import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """A wrong call, or no room for the results, is one sentence and no traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")


class Interrupt:
    """While entered, Ctrl-C asks for an end after the running step; a second Ctrl-C ends at once.

    Not where there are several processes: the others would wait for the one that stopped.
    """

    asked = False

    def __enter__(self) -> "Interrupt":
        handler = self._ask if jax.process_count() == 1 else signal.default_int_handler
        self._before = signal.signal(signal.SIGINT, handler)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        print("\nStopping after the running step; Ctrl-C again ends at once.", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
