"""The command line. Each command imports what it needs when it runs, so that `sparring --help` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparring.errors import SparringError

__all__ = ["main"]

_OVERRIDES = "dotted overrides, such as trainer.learning_rate=1e-5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. An error of ours is one line on standard error, without a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except SparringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of `sparring view | head` has gone
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparring", description="Environments for language-model agents, and the RL backend that trains them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model as a configuration file says")
    train.add_argument("config", help="YAML file, such as examples/quickstart.yaml")
    train.add_argument("overrides", nargs="*", help=_OVERRIDES)
    train.add_argument("--resume", action="store_true", help="go on with the run in run_dir from its last checkpoint")
    train.set_defaults(command=_train)

    show = commands.add_parser("config", help="inspect configurations").add_subparsers(required=True, metavar="show")
    show_config = show.add_parser("show", help="print every knob, its value and where it came from")
    show_config.add_argument("config")
    show_config.add_argument("overrides", nargs="*", help=_OVERRIDES)
    show_config.set_defaults(command=_show_config)

    view = commands.add_parser("view", help="list the episodes of a run, or show one of them token by token")
    view.add_argument("run", help="run folder, such as runs/quickstart")
    view.add_argument("episode", nargs="?", help="episode id, or the start of one; without it, the list")
    view.add_argument("--state", help="only episodes in this state, such as consumed, failed, evaluation")
    view.add_argument("--limit", type=int, default=40, help="at most so many episodes (default: %(default)s)")
    view.add_argument("--tokens", action="store_true", help="each token with its log-probability and version")
    view.set_defaults(command=_view)

    imports = commands.add_parser("import", help="bring a model in").add_subparsers(required=True, metavar="gguf")
    gguf = imports.add_parser("gguf", help="write a GGUF file as a Hugging Face folder")
    gguf.add_argument("file")
    gguf.add_argument("out")
    gguf.set_defaults(command=_import_gguf)

    doctor = commands.add_parser("doctor", help="report what sandboxes this machine can run, measured")
    doctor.set_defaults(command=_doctor)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from sparring.config_file import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    from sparring.run import train  # sets thread counts before torch is imported

    return train(loaded, resume=arguments.resume)


def _show_config(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from sparring.config_file import load_config

    table = Table("key", "value", "from", box=None, pad_edge=False)
    for key, value, origin in load_config(arguments.config, arguments.overrides).lines():
        table.add_row(key, value, origin)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from sparring.view import view

    return view(arguments.run, arguments.episode, arguments.state, arguments.limit, arguments.tokens)


def _import_gguf(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparring.backend.models import import_gguf

    import_gguf(Path(arguments.file), Path(arguments.out))
    print(f"wrote {arguments.out}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from sparring.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
