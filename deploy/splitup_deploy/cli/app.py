"""The ``splitup-deploy`` program. It imports nothing at first: Ctrl-C is quiet from the start."""


def main() -> None:
    """Run the command line; exit code 130 when it is interrupted while it loads."""
    try:
        from splitup_deploy.cli.commands import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
