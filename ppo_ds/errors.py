"""Defines exceptions that are printed as plain lines without a traceback."""

_MAX_CHARACTERS = 2000  # maximum length of a line


class UserError(ValueError):
    """Reports mistakes in the config, the data or a model folder that the user can correct.

    Each problem is one line with the key (or ``file:line``), the value and the remedy; unprintable characters
    are escaped.
    """

    def __init__(self, *problems: str):
        self.problems = [single_line(problem) for problem in problems]
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """Ends a run with exit code 1; the rank that found the problem prints the message, which is one line."""


def not_installed(package: str, extra: str) -> str:
    """Returns the message that ``package`` is not installed, with the command that installs its extra."""
    return f"the package {package} is not installed; run: pip install -c constraints.txt -e '.[{extra}]'"


def single_line(text: str) -> str:
    """Replaces line breaks and control characters by escapes; cuts a long text in the middle."""
    if len(text) > _MAX_CHARACTERS:  # the key is at the beginning and the remedy at the end: cut the middle
        text = f"{text[: _MAX_CHARACTERS // 2]} ... {text[-_MAX_CHARACTERS // 2 :]}"
    return printable(text)


def printable(text: str) -> str:
    """Returns a line with escapes for line breaks, terminal codes and other unprintable characters."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
