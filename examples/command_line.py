"""How a command of the examples ends."""

import sys
from collections.abc import Callable
from typing import NoReturn


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """A wrong call, or no room for the results, is one sentence and no traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
