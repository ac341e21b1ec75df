"""Tests tools: how templates show and call them, the tokens of two turns by hand, and malformed calls."""

import asyncio

import pytest

from ppo_ds.data.prompts import collate_prompts
from ppo_ds.environments.base import load_environment
from ppo_ds.environments.calls import try_environment
from ppo_ds.environments.tool_calls import ToolCall, find_reader, read_hermes, read_llama
from ppo_ds.environments.tools import ToolEnvironment, ToolError, equip
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rollout.keys import EnvironmentConfig
from tests.environments.conftest import Scripted, sampling_of
from tests.environments.test_loading import refused

# a is 3, 0 is 29, the space 39, the line break 40; then <s> and the tag of Llama
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 \n{}"[]:,;_<>/|=.()' + "ABCDEFGHIJKLMNOPQRSTUVWXYZ-'"
SHOWN = "{% if tools %}<s>{% for t in tools %}{{ t | tojson }}{% endfor %}<eos>{% endif %}"
CHAT = (
    SHOWN + "{% for m in messages %}<s>{{ 'ROLE' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
HERMES = CHAT.replace("ROLE", "tool").replace(
    "CALL",
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>",
)
LLAMA = CHAT.replace("ROLE", "ipython").replace(
    "CALL", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
)
# explains the form of Hermes in the system prompt, but writes calls as Qwen3-Coder does
XML = HERMES.replace(
    "<eos>{% endif %}", 'call <tool_call>{"name": ..., "arguments": ...}</tool_call><eos>{% endif %}'
)
XML = XML[: XML.index("\n<tool_call>\n{")] + (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
) + XML[XML.index("{% endfor %}<eos>\n") :]  # fmt: skip


def tokenizer_of(template):
    hf = character_tokenizer(CHARACTERS).hf
    hf.add_special_tokens({"additional_special_tokens": ["<s>", "<|python_tag|>"]})
    hf.chat_template = template
    return Tokenizer(hf)


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: The number.
    """
    return 2 * x


class Adder(ToolEnvironment):
    """Has an async method, a plain function and a JSON schema as tools."""

    async def add(self, a: int, b: int = 5) -> int:
        """Adds two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        await asyncio.sleep(0)
        if a > 90:
            raise ToolError("too large")
        if a < 0:
            raise ValueError("below 0")
        return a + b

    def look(self, **places):
        return {"seen": list(places)}

    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tools = [add, double, schema]

    def finish(self, answer):
        return float(answer == "3")


def episode(generator_of, template, answers):
    """Returns the rollout of one row whose turns are ``answers``, with its tokenizer."""
    tokenizer = tokenizer_of(template)
    equipped, read_calls = equip(tokenizer, Adder, "m:Adder")
    turns = iter(answers)
    backend = Scripted(tokenizer, type("Script", (), {"get": lambda self, text, default: next(turns)})())
    generate = generator_of(
        Adder, backend, tokenizer=equipped, read_calls=read_calls, independent=True, max_prompt_tokens=2000
    )
    row = {"prompt_text": "q", "messages": [{"role": "user", "content": "q"}]}
    return generate(collate_prompts([([3], 900, row)], 0), sampling_of(900)), tokenizer, generate


ASSISTANT = [3, 21, 21, 11, 21, 22, 3, 16, 22]


@pytest.mark.parametrize(
    ("template", "call", "role"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            [22, 17, 17, 14],
        ),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', [11, 18, 27, 22, 10, 17, 16]),
        (
            LLAMA,
            '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
            [11, 18, 27, 22, 10, 17, 16],
        ),
    ],
)
def test_a_call_and_its_result_by_hand(generator_of, template, call, role):
    """The policy's end token is kept; then come line break, <s>, role, result, end and the next answer."""
    rollout, tokenizer, generate = episode(generator_of, template, [call, "3"])
    s = tokenizer.hf.convert_tokens_to_ids("<s>")
    feedback = [40, s, *role, 40, 32, 1, 40, s, *ASSISTANT, 40]
    turn = tokenizer.encode_many([call], special_tokens=False)[0]
    assert rollout.response_ids[0].tolist() == [*turn, 1, *feedback, 32, 1]
    assert rollout.feedback_mask[0].int().tolist() == [0] * (len(turn) + 1) + [1] * len(feedback) + [0, 0]
    assert rollout.episode_ends == ("done",) and rollout.turn_rewards[0].nonzero().tolist() == [
        [len(turn) + len(feedback) + 2]
    ]
    (prompt,), _ = generate.backend.calls
    assert prompt.startswith(
        '<s>{"type": "function", "function": {"name": "add", "description": "Adds two numbers."'
    )
    assert prompt.endswith('{"type": "object"}}}<eos><s>user\nq<eos>\n<s>assistant\n')


def hermes(*calls):
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


JSON, OBJECT = (
    "the call is not valid JSON: ",
    'a call is a JSON object with a text "name" and an object "arguments"',
)
INTEGER = "Input should be a valid integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("turn", "results"),
    [
        (
            hermes('{"name": "add", "arguments": {"a": 1}}', '{"name": "double", "arguments": {"x": 4}}'),
            ["6", "8"],
        ),
        (hermes('{"name": "look", "arguments": {"at": null}}'), ['{"seen": ["at"]}']),
        (hermes('{"name": "double", "arguments": {"x": "4"}}'), ["8"]),
        (f"<think>{hermes('{}')}</think>" + hermes('{"name": "double", "arguments": {"x": 1}}'), ["2"]),
    ],
)
def test_calls_and_their_results(turn, results):
    messages, reward, done = asyncio.run(Adder().step("", read_hermes(turn)))
    assert [message["content"] for message in messages] == results
    assert {message["role"] for message in messages} == {"tool"} and (reward, done) == (0.0, False)


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (hermes('{"name": "add"'), f"{JSON}Expecting ',' delimiter: line 1 column 15 (char 14)"),
        (hermes(""), f"{JSON}Expecting value: line 1 column 1 (char 0)"),
        (hermes("[" * 100_000), f"{JSON}maximum recursion depth exceeded"),
        ('<tool_call>{"name": "add"}', "the call does not end with </tool_call>"),
        (hermes("[]"), OBJECT),
        (hermes('{"name": "add", "arguments": "a"}'), OBJECT),
        (hermes('{"name": "sub\\ud800"}'), "there is no tool 'sub\\ud800'; the tools are add, double, look"),
        (hermes('{"name": "add"}'), "add: a: Missing required argument"),
        (hermes('{"name": "add", "arguments": {"a": 1, "c": 2}}'), "add: c: Unexpected keyword argument"),
        (hermes('{"name": "add", "arguments": {"a": "x"}}'), f"add: a: {INTEGER}"),
        (hermes('{"name": "add", "arguments": {"a": 91}}'), "too large"),
    ],
)
def test_the_policy_is_told_what_is_wrong_with_its_call(turn, told):
    (message,), reward, done = asyncio.run(Adder().step("", read_hermes(turn)))
    assert message["content"].startswith(f"error: {told}")
    assert message["role"] == "tool" and (reward, done) == (0.0, False)


def test_an_exception_of_a_tool_ends_the_response(generator_of):
    turn = hermes('{"name": "add", "arguments": {"a": -1}}')
    rollout, *_ = episode(generator_of, HERMES, [turn])
    assert rollout.episode_ends == ("error",)


def test_llama_separates_calls_by_semicolons():
    two = '{"name": "a", "parameters": {}}; {"name": "b"}'
    assert read_llama(two) == read_llama("<|python_tag|>" + two) == [ToolCall("a", {}), ToolCall("b", {})]
    assert read_llama('The answer is {"name": "a"}') == read_hermes("no call") == []
    (other,) = read_llama('{"name": "a", "arguments": {"x": 1}}')
    assert other.name == "" and other.problem.endswith('and an object "parameters"')
    assert read_llama("<|python_tag|>look.call(x)")[0].problem.startswith("the call is not valid JSON: ")


# -- refused at the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (XML, "writes a call of a tool as '<tool_call>\\n<function=example_tool>"),
        (
            CHAT.replace("CALL", "").replace("ROLE", "tool"),
            "writes a call of a tool as '', which is a form that cannot",
        ),
        (HERMES.replace("arguments", "args").replace("function.args", "function.arguments"), "writes a call"),
        (
            LLAMA.replace("parameters", "arguments").replace("function.parameters", "function.arguments"),
            "writes a call",
        ),
        (
            HERMES.removeprefix(SHOWN),
            "does not show the tools (add, double, look) to the policy; set data.chat",
        ),
    ],
)
def test_templates_whose_form_is_unknown_are_refused(template, problem):
    line = refused(lambda: equip(tokenizer_of(template), Adder, "m:Adder"))
    assert line.startswith(f"rollout.environment.path=m:Adder: the chat template {problem}")
    assert "data.chat_template" in line


def test_a_template_without_a_place_for_results_is_refused():
    template = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + HERMES
    line = refused(lambda: equip(tokenizer_of(template), Adder, "m:Adder"))
    assert line.startswith("the chat template refuses a chat with the roles user, assistant, tool")


HEAD = "from ppo_ds.environments.tools import ToolEnvironment\n"
TOOL = 'def add(a: int):\n    """Adds.\n\n    Args:\n        a: One.\n    """\n'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("tools = []", "tools is '[]' (list); make it a list of functions and JSON schemas"),
        ("tools = [3]", "the tool '3' (int): 'int' object has no attribute '__name__'; give a function with"),
        ("tools = [add, add]", "two tools have the name add; rename one of them"),
        ('tools = [add, {"function": {"name": "add"}}]', "two tools have the name add; rename one of them"),
        (
            'tools = [{"function": {"name": "sub"}}]',
            "the class has no method sub, whose JSON schema is in tools; add it",
        ),
        (
            "def f(self, x: int): ...\n    tools = [f]",
            "): Cannot generate JSON schema for f because it has no",
        ),
    ],
)
def test_tools_that_are_not_valid_are_refused(tmp_path, body, problem):
    file = tmp_path / f"m{abs(hash(body))}.py"
    file.write_text(f"{HEAD}{TOOL}class Mine(ToolEnvironment):\n    {body}\n")
    make = load_environment(f"{file}:Mine", {})
    line = refused(lambda: equip(tokenizer_of(HERMES), make.func, "m:Mine"))
    assert line.startswith("rollout.environment.path=m:Mine: ") and problem in line


def test_the_trial_call_finds_a_prompt_that_is_too_long_or_no_chat(tmp_path):
    (tmp_path / "good.py").write_text(f"{HEAD}{TOOL}class Mine(ToolEnvironment):\n    tools = [add]\n")
    path, messages = f"{tmp_path}/good.py:Mine", [{"role": "user", "content": "q"}]
    tokenizer, chat = tokenizer_of(HERMES), {"prompt_text": "q", "messages": messages}
    try_environment(EnvironmentConfig(path=path), chat, tokenizer, 1000)
    assert "tokens with its tools; raise data.max_prompt_tokens" in refused(
        lambda: try_environment(EnvironmentConfig(path=path), chat, tokenizer, 100)
    )
    assert "has tools, but the prompt is a text" in refused(
        lambda: try_environment(EnvironmentConfig(path=path), {"prompt_text": "q"}, tokenizer, 1000)
    )


def test_find_reader_knows_the_form_by_its_example():
    found = [find_reader(tokenizer_of(template), [], "k") for template in (HERMES, LLAMA)]
    assert found == [read_hermes, read_llama]
