"""`python -m bass_lab.cli`: the `bass` command."""

from bass_lab.cli.main import app

app(prog_name="bass")
