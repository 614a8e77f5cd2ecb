"""The `bass` command, also as `python -m bass_lab.cli`."""

import atexit
import gc
import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `CommandLine` handles Ctrl-C, end silently
    atexit.register(gc.freeze)  # the last garbage collection over torch's objects would take a second
    from bass_lab.cli.main import app

    app(prog_name="bass")


if __name__ == "__main__":
    main()
