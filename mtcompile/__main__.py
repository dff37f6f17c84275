"""``python -m mtcompile``: the command line where its script is not on the path."""

from mtcompile.cli.app import app

app(prog_name="mtcompile")
