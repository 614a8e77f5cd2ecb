"""The `bass` command, also as `python -m bass_lab.cli`."""

import atexit
import gc
import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # before there is anybody to catch it, a Ctrl-C is a silent end
    atexit.register(gc.freeze)  # Python's last look for rubbish, in all that torch has brought, takes a second
    from bass_lab.cli.main import app

    app(prog_name="bass")


if __name__ == "__main__":
    main()
