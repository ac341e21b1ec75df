"""Talks to one model, or to two side by side: python launch/chat.py MODEL [MODEL] [KEY=VALUE ...]

    python launch/chat.py outputs/base outputs/tuned reward=function reward.path=score.py:score

MODEL is a run directory, a model folder, a folder with a LoRA adapter, or a Hub name. The other arguments are
those of launch/train.py, of which sampling.*, reward.*, actor.model.* (dtype, trust_remote_code, ...),
data.system, data.chat_template* and run.seed have an effect. sampling.max_new_tokens is 512 unless it is set.
Options:

    --reward REWARD   shows the score of each answer: a group such as format, a function FILE.py:fn, or the
                      folder or Hub name ORG/NAME of a reward model; reward=... and reward.KEY=... set it too
    --greedy          takes the most likely token instead of sampling

/help lists the commands of the chat. Lines can come from a pipe. docs/chat.md describes the chat.

Exit code 0: the chat has ended; 2: the arguments, a model folder or the reward is wrong; 130: interrupted
while the models were loading; 1: any other error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser, compose_for_models, parse_options, split_models  # noqa: E402
from launch.hub import use_caches_without_the_hub  # noqa: E402
from launch.process import complain, prepare_environment  # noqa: E402
from ppo_ds.commands.entry_points import command, with_commands  # noqa: E402
from ppo_ds.config.checks.data import looks_local  # noqa: E402
from ppo_ds.config.schema import PPOConfig, reward_models  # noqa: E402
from ppo_ds.distributed.exit import exit_now  # noqa: E402
from ppo_ds.errors import RunError, UserError, printable  # noqa: E402
from ppo_ds.tools.model_argument import NamedModel, find_models  # noqa: E402

MAX_MODELS = 2
RUN_DIR = Path("outputs", "chat")  # of the config that is checked; nothing is written there


@dataclass(frozen=True)
class Wanted:
    """The chat that a command line describes."""

    config: PPOConfig
    models: list[NamedModel]
    with_reward: bool
    greedy: bool

    def hub_names(self) -> list[str]:
        """Returns the names of models and tokenizers that are not folders."""
        paths = [path for model in self.models for path in (model.path, model.tokenizer_path)]
        if self.with_reward:
            paths += [str(section["path"]) for _, section in reward_models(self.config.reward)]
        return [path for path in dict.fromkeys(paths) if not looks_local(path)]


def main(argv: list[str]) -> int:
    try:
        wanted = parse(argv)
        config = wanted.config
        use_caches_without_the_hub(wanted.hub_names())
        prepare_environment(config.run.verbose)
        # slow: imports torch and transformers
        from ppo_ds.distributed.world import connect
        from ppo_ds.tools.chat import Chat, load_partners, run_chat
        from ppo_ds.tracking.chat import ChatView

        view = ChatView()
        world = connect(config.run.timeout_minutes, config.run.verbose, config.run.threads)
        partners = load_partners(
            config, world, wanted.models, with_reward=wanted.with_reward, greedy=wanted.greedy, note=view.note
        )
    except UserError as error:
        return complain(error)
    except RunError as error:
        return complain(UserError(str(error)))
    except KeyboardInterrupt:
        return 130
    view.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat")
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and a history
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    run_chat(Chat(partners, view, config.run.seed, config.data.system), read_line)
    world.close()
    return 0


def parse(argv: list[str]) -> Wanted:
    """Reads the command line. Raises UserError, and SystemExit(0) after --help."""
    parser = Parser(prog="launch/chat.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--reward")
    parser.add_argument("--greedy", action="store_true")
    options = parse_options(argv, prog="launch/chat.py", parents=[parser])
    if options.help is not None:
        print(with_commands(__doc__), end="")
        raise SystemExit(0)
    arguments, overrides, base = split_models(options.overrides)
    if not 1 <= len(arguments) <= MAX_MODELS:
        raise UserError(
            f"MODEL: {len(arguments)} are given; give one model, or two to see them side by side, such as "
            f"{command('chat')} outputs/base outputs/tuned; see --help"
        )
    models = find_models(arguments, base)
    chosen = reward_arguments(options.reward) if options.reward else []
    # a chat reads no data, but every config needs some
    config, with_reward = compose_for_models(
        options, ["data.path=org/none", *chosen, *overrides], models, RUN_DIR, reward_optional=True
    )
    if config.actor.model.revision is not None:
        raise UserError(
            f"actor.model.revision={config.actor.model.revision}: a chat loads the newest revision; download "
            "this one (hf download NAME --revision REVISION) and give its folder as MODEL"
        )
    return Wanted(config, models, with_reward, options.greedy)


def reward_arguments(reward: str) -> list[str]:
    """Returns the overrides that --reward stands for."""
    if ":" in reward:
        return ["reward=function", f"reward.path={reward}"]
    if "/" in reward or Path(reward).is_dir():
        return ["reward=model", f"reward.model.path={reward}"]
    return [f"reward={reward}"]


def read_line() -> str | None:
    """Reads a line of input; returns None at the end. Lines from a pipe are shown, as on a terminal."""
    terminal = sys.stdin.isatty()
    try:
        # bytes that are no UTF-8 arrive as surrogates, which no tokenizer accepts
        text = input("> " if terminal else "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except EOFError:
        text = None
    except KeyboardInterrupt:
        print()
        raise
    if terminal and text is None:
        print()
    elif not terminal and text is not None:
        print(f"> {printable(text)}", flush=True)
    return text


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # a normal interpreter exit may crash in threads of the libraries although the chat succeeded
    exit_now(code)
