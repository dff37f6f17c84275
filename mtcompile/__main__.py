"""``mtcompile``: the command line, from its first moment on: no stream is missing, and Ctrl-C amid imports is no traceback."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        _open_missing_streams()
        from mtcompile.cli.app import app

        app(prog_name="mtcompile")
    except KeyboardInterrupt:
        print("mtcompile: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        exec("")  # Python ends by SIGINT if Ctrl-C ended the last code that exec ran, as for a dataclass, though it was caught


def _open_missing_streams() -> None:
    """Drops what is written to a stream that the caller has closed: Python has None for it, and the next file that is opened
    would get its number, and what libraries in C print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


if __name__ == "__main__":
    main()
