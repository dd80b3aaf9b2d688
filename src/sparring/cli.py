"""The command line. Each command imports what it needs when it runs, so that `sparring --help` is instant."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sparring.errors import ConfigError, SparringError
from sparring.extras import lacking
from sparring.interrupt import insisted
from sparring.spelling import did_you_mean, nearest
from sparring.transcript import printable
from sparring.types import EPISODE_STATES

if TYPE_CHECKING:
    from sparring.fine_tune import FineTuning

__all__ = ["main"]

_INTERRUPTED = 130
_OVERRIDES = "dotted overrides, such as trainer.learning_rate=1e-5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. An error of ours is one line on standard error, without a traceback."""
    if os.getcwd() not in sys.path:  # the console script leaves it out, and users' environments and agents lie there
        sys.path.append(os.getcwd())
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides behind an option, which argparse takes for strangers
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        status = arguments.command(arguments)
        if status == _INTERRUPTED and argv is None:  # what is left is the interpreter's end
            signal.signal(signal.SIGINT, insisted)
        return status
    except SparringError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except ImportError as error:  # of a package that a bare `pip install sparring` leaves out
        if (lack := lacking(error)) is None:
            raise
        print(f"error: {lack}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of `sparring view | head` has gone
        sys.stderr.close()
        return 0


class _PrintableFormatter(logging.Formatter):
    """Of warnings on standard error, which may quote a model or an agent."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names, so that a new one breaks no old command. Answers a misspelt option, command
    or other choice with the nearest that there is. Its subparsers do, too.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Strange options are refused here, or argparse would first miss what they were meant to be."""
        given = list(sys.argv[1:] if args is None else args)
        for i, text in enumerate(given):
            option, _, value = text.partition("=")
            if text == "--" or (self._subparsers is not None and not text.startswith("-")):
                break  # what follows is positional, or the subparser's
            if re.fullmatch("--?[A-Za-z]\\S*", option) and option not in self._option_string_actions:
                value = value or next((v for v in given[i + 1 : i + 2] if not v.startswith("--")), "")
                self.error(f"there is no option {option}{self._meant(option, value)}")
        return super().parse_known_args(given, namespace)

    def _meant(self, option: str, value: str) -> str:
        """For `--steps 3`, where overrides are meant: `trainer.steps=3`. Else the nearest option that there is."""
        name = option.lstrip("-")
        if any(action.dest == "overrides" for action in self._actions):
            from sparring.config_file import keys_named

            if meant := [f"{key}={value}" for key in keys_named(name.replace("-", "_"))]:
                return f"; a key of the configuration is set as KEY=VALUE: {' or '.join(meant)}"
        options = {known.lstrip("-"): known for known in self._option_string_actions}
        near = nearest(name.replace("_", "-"), options, abbreviated=True)
        return f"; did you mean {options[near]}?" if near is not None else f"; `{self.prog} --help` lists them"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), names) or "."
            raise argparse.ArgumentError(action, f"there is no {value!r}{hint} Choose from {', '.join(names)}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sparring", description="Environments for language-model agents, and the RL backend that trains them."
    )
    parser.add_argument("--version", action="version", version=f"sparring {version('sparring')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model as a configuration file says")
    train.add_argument("config", metavar="FILE", help="YAML file, such as examples/quickstart.yaml")
    train.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)
    train.add_argument("--resume", action="store_true", help="go on with the run in run_dir from its last checkpoint")
    _runs(train, _train)

    serve = commands.add_parser("serve", help="keep what runs share").add_subparsers(required=True, metavar="inference")
    inference = serve.add_parser("inference", help="start a configuration's inference servers, until Ctrl-C")
    inference.add_argument("config", metavar="FILE")
    inference.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)
    inference.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    inference.add_argument("--port", type=int, default=0, help="of the first server (default: free ones)")
    _runs(inference, _serve_inference)

    config = commands.add_parser("config", help="inspect and explain configurations")
    configs = config.add_subparsers(required=True, metavar="{show,explain}")
    show_config = configs.add_parser("show", help="print every knob, its value and where it came from")
    show_config.add_argument("config", metavar="FILE")
    show_config.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)
    _runs(show_config, _show_config)
    explain_config = configs.add_parser("explain", help="print every knob, its default and what it means")
    explain_config.add_argument(
        "prefix", nargs="?", default="", metavar="KEY", help="only it, or those that begin so, such as trainer"
    )
    _runs(explain_config, _explain_config)

    evaluation = commands.add_parser("eval", help="play held-out episodes and report pass@k with intervals")
    evaluation.add_argument("model", help="model folder, run folder, its checkpoint, or a name that --base-url serves")
    evaluation.add_argument("--env", action=_AddEnv, metavar="ID", dest="envs", help="may be given several times")
    evaluation.add_argument(
        "--env-arg", action=_AddEnvArgument, metavar="KEY=VALUE", dest="envs", help="argument of the --env before it"
    )
    evaluation.add_argument(
        "--episodes", type=int, metavar="N", help="of each environment, in all (default: a whole split)"
    )
    evaluation.add_argument("--k", type=int, default=1, metavar="K", help="tries of each task (default: %(default)s)")
    evaluation.add_argument("--split", default="test", help="default: %(default)s")
    temperature = evaluation.add_mutually_exclusive_group()
    temperature.add_argument(
        "--temperature", type=float, metavar="T", help="default: greedy at --k 1, else the run's or 1"
    )
    temperature.add_argument("--greedy", action="store_const", const=0.0, dest="temperature")
    evaluation.add_argument("--policy", help="'native' or file.py:factory (default: the run's, or native)")
    evaluation.add_argument("--out", metavar="FILE.jsonl", help="every episode; a half-done file is taken up again")
    _add_overwrite(evaluation, "begin the file of --out anew")
    evaluation.add_argument(
        "--base-url", metavar="URL", help="OpenAI-compatible endpoint, such as http://localhost:8000/v1"
    )
    evaluation.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="default: %(default)s")
    evaluation.add_argument(
        "--deadline", type=float, metavar="S", help="seconds an episode may take, else it has failed"
    )
    evaluation.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="episodes at once (default: %(default)s)"
    )
    evaluation.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=_OVERRIDES)
    _runs(evaluation, _eval)

    view = commands.add_parser(
        "view",
        help="list the episodes of a run, or show one of them token by token",
        usage="sparring view [-h] [--state STATE] [--limit LIMIT] [--tokens] (RUN | --batch FILE) [EPISODE]",
    )
    view.add_argument("run", nargs="?", help="run folder, such as runs/quickstart")
    view.add_argument("episode", nargs="?", help="episode id; without it, the list")
    view.add_argument("--batch", metavar="FILE", help="instead of a run: a batch that a run refused to train")
    view.add_argument("--state", choices=EPISODE_STATES, help="only episodes in this state")
    view.add_argument("--limit", type=int, default=40, help="at most so many episodes (default: %(default)s)")
    view.add_argument("--tokens", action="store_true", help="each token with its log-probability and version")
    _runs(view, _view)

    exporting = commands.add_parser("export", help="write a run's rewarded episodes as JSONL, for supervised training")
    exporting.add_argument("run", help="run folder, such as runs/quickstart")
    exporting.add_argument("--format", choices=("chat", "tokens"), default="chat", help="default: %(default)s")
    exporting.add_argument("--min-reward", type=float, required=True, metavar="R", help="only episodes with so much")
    exporting.add_argument("--out", required=True, metavar="FILE.jsonl", help="a new file")
    _add_overwrite(exporting, "replace the file, if it is there")
    _runs(exporting, _export)

    sft = commands.add_parser("sft", help="fine-tune a model on a run's rewarded episodes: rejection sampling")
    _add_fine_tuning(sft, learning_rate=1e-5, batch_size=32)
    sft.add_argument("--min-reward", type=float, required=True, metavar="R", help="only episodes with so much")
    sft.add_argument(
        "--per-task", type=int, metavar="N", help="at most so many episodes a task, the best (default: all)"
    )
    _runs(sft, _sft)

    dpo = commands.add_parser("dpo", help="fine-tune a model on a run's pairs of better and worse episodes, by TRL")
    _add_fine_tuning(dpo, learning_rate=1e-6, batch_size=8)
    dpo.add_argument("--beta", type=float, default=0.1, help="pull to the model it starts from (default: %(default)s)")
    dpo.add_argument(
        "--min-gap", type=float, default=0.0, metavar="R", help="rewards of a pair differ by so much (default: at all)"
    )
    dpo.add_argument(
        "--pairs-per-group", type=int, default=4, metavar="N", help="at most so many (default: %(default)s)"
    )
    _runs(dpo, _dpo)

    imports = commands.add_parser("import", help="bring a model in").add_subparsers(required=True, metavar="gguf")
    gguf = imports.add_parser("gguf", help="write a GGUF file as a Hugging Face folder")
    gguf.add_argument("file")
    gguf.add_argument("out", help="a new folder")
    _add_overwrite(gguf, "replace the model in the folder, if it is there")
    _runs(gguf, _import_gguf)

    doctor = commands.add_parser("doctor", help="report what sandboxes this machine can run, measured")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    _runs(doctor, _doctor)
    return parser


def _add_fine_tuning(parser: argparse.ArgumentParser, *, learning_rate: float, batch_size: int) -> None:
    parser.add_argument("run", help="run folder, such as runs/quickstart; it is read alone, and may be running")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the model's Hugging Face folder, a new one")
    _add_overwrite(parser, "replace the model in the folder, if it is there")
    parser.add_argument("--model", metavar="MODEL", help="to start from (default: the one that the run started from)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, metavar="X", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=batch_size, metavar="N", help="a step (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=_OVERRIDES)


def _runs(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    parser.set_defaults(command=command)


def _add_overwrite(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--overwrite", action="store_true", help=meaning)


class _AddEnv(argparse.Action):
    """Collects (id, arguments)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), (values, {})])


class _AddEnvArgument(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        import yaml

        envs = getattr(namespace, self.dest)
        key, separator, text = values.partition("=")
        if not envs or not separator or not key:
            parser.error(f"{option_string} {values!r}: KEY=VALUE, behind the --env that it belongs to")
        try:
            envs[-1][1][key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            parser.error(f"{option_string} {values!r}: {error}")


def _eval(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparring.config import EnvPart
    from sparring.evaluate import EvalRequest, evaluate

    return evaluate(
        EvalRequest(
            model=arguments.model,
            envs=tuple(EnvPart(id=env_id, kwargs=kwargs) for env_id, kwargs in arguments.envs or ()),
            episodes=arguments.episodes,
            samples=arguments.k,
            split=arguments.split,
            temperature=arguments.temperature,
            policy=arguments.policy,
            out=Path(arguments.out) if arguments.out else None,
            overwrite=arguments.overwrite,
            base_url=arguments.base_url,
            api_key_env=arguments.api_key_env,
            deadline_s=arguments.deadline,
            concurrency=arguments.concurrency,
            overrides=tuple(arguments.set),
        )
    )


def _train(arguments: argparse.Namespace) -> int:
    from sparring.config_file import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    from sparring.run import train  # sets thread counts before torch is imported

    return train(loaded, resume=arguments.resume)


def _serve_inference(arguments: argparse.Namespace) -> int:
    from sparring.config_file import load_config
    from sparring.serve import serve_inference

    config = load_config(arguments.config, arguments.overrides).config
    return serve_inference(config, host=arguments.host, port=arguments.port)


def _show_config(arguments: argparse.Namespace) -> int:
    from sparring.config_file import load_config

    return _print_table(("key", "value", "from"), load_config(arguments.config, arguments.overrides).lines())


def _explain_config(arguments: argparse.Namespace) -> int:
    from sparring.config_file import explain_keys

    return _print_table(("key", "default", "meaning"), explain_keys(arguments.prefix))


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    from rich.table import Table

    from sparring.display import open_console

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    open_console().print(table)
    return 0


def _view(arguments: argparse.Namespace) -> int:
    if arguments.batch is not None:
        from pathlib import Path

        from sparring.batch_view import view_batch

        if arguments.episode is not None:
            raise ConfigError("`sparring view --batch FILE [EPISODE]` takes no RUN")
        return view_batch(Path(arguments.batch), arguments.run, tokens=arguments.tokens)
    if arguments.run is None:
        raise ConfigError("`sparring view` needs a run folder, such as runs/quickstart, or --batch FILE")
    from sparring.view import view

    return view(arguments.run, arguments.episode, arguments.state, arguments.limit, arguments.tokens)


def _export(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparring.export import export
    from sparring.fates import fates

    out = Path(arguments.out)
    lines, episodes = export(arguments.run, arguments.format, arguments.min_reward, out, overwrite=arguments.overwrite)
    told = sys.stdout if out.is_file() else sys.stderr  # else the lines may be going to standard output
    print(f"wrote {lines} lines of {sum(episodes.values())} episodes to {out}: {fates(episodes)}", file=told)
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    from sparring.fine_tune import sft

    return sft(_fine_tuning(arguments), min_reward=arguments.min_reward, per_task=arguments.per_task)


def _dpo(arguments: argparse.Namespace) -> int:
    from sparring.fine_tune import dpo

    return dpo(
        _fine_tuning(arguments),
        beta=arguments.beta,
        min_gap=arguments.min_gap,
        pairs_per_group=arguments.pairs_per_group,
    )


def _fine_tuning(arguments: argparse.Namespace) -> FineTuning:
    from pathlib import Path

    from sparring.fine_tune import FineTuning

    return FineTuning(
        run=arguments.run,
        out=Path(arguments.out),
        overwrite=arguments.overwrite,
        model=arguments.model,
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        batch_size=arguments.batch_size,
        overrides=tuple(arguments.set),
    )


def _import_gguf(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparring.backend.folders import written_aside
    from sparring.outputs import check_new_folder, writing

    out = Path(arguments.out)
    check_new_folder(out, overwrite=arguments.overwrite, argument="OUT")
    from sparring.backend.models import import_gguf

    with writing(out, argument="OUT"), written_aside(out) as partial:
        import_gguf(Path(arguments.file), partial)
    print(f"wrote {out}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from sparring.doctor import doctor

    return doctor(["--json"] if arguments.json else [])


if __name__ == "__main__":
    sys.exit(main())
