"""Chats with one or two models: python launch/chat.py MODEL [MODEL] [KEY=VALUE ...]

    python launch/chat.py outputs/base outputs/tuned reward=function reward.path=score.py:score

MODEL is a run directory, a model folder, a folder with a LoRA adapter, or a Hub name. The other arguments are
those of launch/train.py; only sampling.*, reward.*, actor.model.* (dtype, trust_remote_code, ...),
data.system, data.chat_template* and run.seed have an effect. sampling.max_new_tokens is 512 unless it is set.
With a reward, the line below each answer shows its score. --greedy chooses the most likely token instead of
sampling. /help lists the commands of the chat. The input can be a pipe. docs/chat.md describes the chat.

Exit code 0: the chat has ended; 2: the arguments, a model folder or the reward is wrong; 130: interrupted
while the models were loading; 1: any other error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser, compose_for_models, parse_options, split_models
from launch.composing import EXAMPLES
from launch.hub import use_caches_without_the_hub
from launch.process import complain, prepare_environment, run_main
from ppo_ds.commands.entry_points import command, with_commands
from ppo_ds.config.checks.data import hub_names, looks_local
from ppo_ds.config.schema import PPOConfig
from ppo_ds.errors import RunError, UserError, printable
from ppo_ds.tools.model_argument import NamedModel, find_models

RUN_DIR = Path("outputs", "chat")  # of the config that is checked; nothing is written there
DATA = EXAMPLES / "zysnlp_prompts.jsonl"  # every config needs data, but a chat does not read it


@dataclass(frozen=True)
class Wanted:
    """The chat that a command line describes."""

    config: PPOConfig
    models: list[NamedModel]
    with_reward: bool
    greedy: bool


def main(argv: list[str]) -> int:
    try:
        wanted = parse(argv)
        config = wanted.config
        paths = [model.path for model in wanted.models if not looks_local(model.path)]
        use_caches_without_the_hub([*paths, *hub_names(config)])
        prepare_environment(config.run.verbose)
        # slow: imports torch and transformers
        from ppo_ds.distributed.world import connect
        from ppo_ds.tools.chat import Chat, load_partners, note, run_chat
        from ppo_ds.tracking.screen import open_console

        console = open_console()
        say = partial(note, console)
        world = connect(config.run.timeout_minutes, config.run.verbose, config.run.threads)
        partners = load_partners(
            config, world, wanted.models, with_reward=wanted.with_reward, greedy=wanted.greedy, note=say
        )
    except (UserError, RunError) as error:
        return complain(error)
    except KeyboardInterrupt:
        return 130
    say("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat")
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and a history
    # no tokenizer accepts the surrogates that bytes other than UTF-8 would become
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    run_chat(Chat(partners, console, config.run.seed, config.data.system), read_line)
    world.close()
    return 0


def parse(argv: list[str]) -> Wanted:
    """Reads the command line. Raises UserError, and SystemExit(0) after --help."""
    parser = Parser(prog="launch/chat.py", add_help=False)
    parser.add_argument("--greedy", action="store_true")
    options = parse_options(argv, prog="launch/chat.py", parents=[parser])
    if options.help is not None:
        print(with_commands(__doc__), end="")
        raise SystemExit(0)
    arguments, overrides, base = split_models(options.overrides)
    if len(arguments) not in (1, 2):
        raise UserError(
            f"MODEL: {len(arguments)} are given; give one model, or two to compare their answers, such as "
            f"{command('chat')} outputs/base outputs/tuned; see --help"
        )
    models = find_models(arguments, base)
    config, with_reward = compose_for_models(
        options, [f"data.path={DATA}", *overrides], models, RUN_DIR, reward_optional=True
    )
    if config.actor.model.revision is not None:
        raise UserError(
            f"actor.model.revision={config.actor.model.revision}: a chat loads the newest revision; download "
            "this one (hf download NAME --revision REVISION) and give its folder as MODEL"
        )
    return Wanted(config, models, with_reward, options.greedy)


def read_line() -> str | None:
    """Returns the next line of input, or None at the end. A line from a pipe is also printed, as if typed."""
    terminal = sys.stdin.isatty()
    try:
        text = input("> " if terminal else "")
    except EOFError:
        print()
        return None
    if not terminal:
        print(f"> {printable(text)}", flush=True)
    return text


if __name__ == "__main__":
    run_main(main)
