"""The exceptions that are printed as plain lines, never as a traceback: what the user can mend, and what has ended a run."""

_LONGEST = 2000  # characters of a line


class UserError(ValueError):
    """Something in the config, the data or a model folder is wrong.

    Each problem is one line that names the key (or file:line), the value and the remedy. What is quoted in it may hold anything: what does
    not print (line breaks, terminal codes, half surrogates, characters that turn the direction of writing) is shown as its escape.
    """

    def __init__(self, *problems: str):
        self.problems = [_on_one_line(problem) for problem in problems]
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """What ended a run that had begun, told in full by its message and no other rank's doing: one line, exit code 1."""


def _on_one_line(text: str) -> str:
    if len(text) > _LONGEST:  # the key stands at the beginning, the remedy at the end
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return (
        text
        if text.isprintable()
        else "".join(
            c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
        )
    )
