"""The one exception that means "the user can mend this": printed as plain lines, never as a traceback."""


class UserError(ValueError):
    """Something in the config, the data or a model folder is wrong.

    Each problem is one line that names the key (or file:line), the value and the remedy.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)
