from typer.testing import CliRunner, Result

from bass_lab.cli import main


def invoke(*arguments: object, **options: object) -> Result:
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], **options)
