"""Chat templates in the shape of each family, with its control tokens: small, written for the tests."""

# ruff: noqa: E501 (one template statement a line)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.chat.template import CHATML_TEMPLATE
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, make


@dataclass(frozen=True)
class Family:
    """`appends`: the template leaves earlier turns alone. `reasons`: it shows reasoning."""

    name: str
    parser: str
    template: str
    special: tuple[str, ...]
    markers: tuple[str, ...] = ()
    eos: str = "<|im_end|>"
    appends: bool = True
    reasons: bool = True

    def directory(self, folder: Path) -> Path:
        return make(folder / self.name, self.template, self.special, self.markers, self.eos)


def _jinja(text: str) -> str:
    """Templates are written one statement a line; the line breaks between are not part of them."""
    return "".join(line.strip() for line in text.strip().splitlines())


_CHATML_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'TOOLS\\nHEADER' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
"""

_CHATML_LOOP = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
THINK
{{- m.content }}
CALLS
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (tools and loop.first and m.role == 'system') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_THINK = "{%- if m.reasoning_content is string %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"


def _chatml(header: str, calls: str, think: str = _THINK) -> str:
    body = _CHATML_TOOLS.replace("HEADER", header) + _CHATML_LOOP
    return _jinja(body.replace("THINK", think).replace("CALLS", calls))


_HERMES_CALLS = """
{%- for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
"""

QWEN25 = Family(
    "qwen25",
    "hermes",
    _chatml("<tool_call>", _HERMES_CALLS, think=""),
    CHATML_SPECIAL,
    CHATML_MARKERS,
    reasons=False,
)

QWEN3_CODER = Family(
    "qwen3_coder",
    "qwen3_coder",
    _chatml(
        "<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>",
        """
{%- for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}
""",
    ),
    CHATML_SPECIAL,
    CHATML_MARKERS,
)

LLAMA3_JSON = Family(
    "llama3_json",
    "llama3_json",
    _jinja("""
{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{%- if tools %}{{ '\\nAnswer with {"name": function, "parameters": object}.' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson(indent=4)) }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- for c in m.tool_calls %}
{{- '; ' if not loop.first }}{{ '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}
{%- endfor %}{{ '<|eot_id|>' }}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""),
    (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    eos="<|eot_id|>",
    reasons=False,
)

PYTHONIC = Family(
    "pythonic",
    "pythonic",
    LLAMA3_JSON.template.replace(
        """{{- '; ' if not loop.first }}{{ '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}""",
        "{{- '[' if loop.first else ', ' }}{{ c.function.name + '(' }}{% for k, v in c.function.arguments | items %}"
        "{{- ', ' if not loop.first }}{{ k + '=' + (v | tojson) }}{% endfor %}{{ ')' }}{{ ']' if loop.last }}",
    ).replace('{"name": function, "parameters": object}', "[func_name1(params_name1=params_value1)]"),
    LLAMA3_JSON.special,
    eos="<|eot_id|>",
    reasons=False,
)

_MISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- if m.tool_calls %}CALLS{% endif %}{{ eos_token }}
{%- elif not loop.first %}{{ raise_exception('only the first message may be a system message') }}
{%- endif %}
{%- endfor %}
"""
_MISTRAL_SPECIAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip

MISTRAL = Family(
    "mistral",
    "mistral",
    _jinja(
        _MISTRAL.replace(
            "CALLS",
            "{{- '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
            "{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}",
        )
    ),
    _MISTRAL_SPECIAL,
    eos="</s>",
    reasons=False,
)

MISTRAL_ARGS = Family(
    "mistral_args",
    "mistral",
    _jinja(
        _MISTRAL.replace(
            "CALLS",
            "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + (c.function.arguments | tojson) }}"
            "{% endfor %}",
        ).replace(
            "{{ m.content }}",
            "{% if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{ m.content }}",
        )
    ),
    _MISTRAL_SPECIAL,
    eos="</s>",
)

_DEEPSEEK = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n\\n## Tools' }}{% for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor %}{% endif %}
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% set ns.asked = true %}
{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>OPEN' if ns.asked }}{% set ns.asked = false %}{{ m.content }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' }}
ONE{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{ '<｜Assistant｜>OPEN' }}{% endif %}
"""
_DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>",
)  # fmt: skip

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "deepseek_v3",
    _jinja(
        _DEEPSEEK.replace("OPEN", "").replace(
            "ONE",
            "{{ 'function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}",
        )
    ),
    _DEEPSEEK_SPECIAL,
    _DEEPSEEK_MARKERS,
    eos="<｜end▁of▁sentence｜>",
    reasons=False,
)

DEEPSEEK_V31 = Family(
    "deepseek_v31",
    "deepseek_v31",
    _jinja(
        _DEEPSEEK.replace("OPEN", "</think>").replace(
            "ONE", "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
        )
    ),
    _DEEPSEEK_SPECIAL,
    _DEEPSEEK_MARKERS,
    eos="<｜end▁of▁sentence｜>",
    reasons=False,
)

GLM = Family(
    "glm",
    "glm",
    _jinja("""
{{- '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\nTOOLS' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for c in m.tool_calls %}{{ '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""),
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
     "<tool_response>", "</tool_response>"),
    eos="<|endoftext|>",
)  # fmt: skip

KIMI_K2 = Family(
    "kimi_k2",
    "kimi_k2",
    _jinja("""
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + '<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- if m.reasoning_content is string %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + (c.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}
{%- else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""),
    ("[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
     "<|tool_call_argument_begin|>"),
    ("<think>", "</think>"),
)  # fmt: skip

HARMONY = Family(
    "harmony",
    "harmony",
    _jinja("""
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>namespace functions ' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- set ns = namespace(tool='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking is string %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- if m.tool_calls %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- for c in m.tool_calls %}{% set ns.tool = c.function.name %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + c.function.name + ' <|constrain|>json<|message|>' + (c.function.arguments | tojson) + '<|call|>' }}
{%- endfor %}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + (m.name or ns.tool) + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""),
    (
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
    ),
    eos="<|return|>",
    appends=False,  # the final answer's <|return|> becomes <|end|> in the history
)

MINIMAX_M2 = Family(
    "minimax_m2",
    "minimax_m2",
    _jinja("""
{{- ']~!b[]~b]system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n# Tools' }}{% for tool in tools %}{{ '\\n<tool>' + (tool.function | tojson) + '</tool>' }}{% endfor %}{% endif %}
{{- '[e~[\\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ ']~b]ai\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}
{%- if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}
{%- for c in m.tool_calls %}{{ '<invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\\n' }}
{%- endfor %}{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}
{%- elif m.role == 'tool' %}
{{- ']~b]tool' if loop.first or messages[loop.index0 - 1].role != 'tool' }}{{ '\\n<response>' + m.content + '</response>' }}
{{- '[e~[\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif m.role == 'user' or not loop.first %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""),
    ("]~!b[", "]~b]", "[e~["),
    ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    eos="[e~[",
)

_GEMMA = """
{%- macro show(v) %}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ ',' if not loop.first }}{{ '<|"|>' + k + '<|"|>:' }}{{ show(x) }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}{{ '[' }}{% for x in v %}{{ ',' if not loop.first }}{{ show(x) }}{% endfor %}{{ ']' }}
{%- else %}{{ v }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools or messages[0].role == 'system' %}{{ '<|turn>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + (tool.function | tojson) + '<tool|>' }}{% endfor %}{{ '<turn|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|turn>model\\n' }}
{%- if m.reasoning_content is string %}{{ '<|channel>thought\\n' + m.reasoning_content + '<channel|>' }}{% endif %}{{ m.content | trim }}
{%- for c in m.tool_calls %}{{ '<|tool_call>call:' + c.function.name + '{' }}
{%- for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k + ':' }}{{ show(v) }}{% endfor %}{{ '}<tool_call|>' }}
{%- endfor %}{{ '<turn|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|turn>tool\\n<|tool_response>response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}<tool_response|><turn|>\\n' }}
{%- elif not (loop.first and m.role == 'system') %}{{ '<|turn>' + m.role + '\\n' + (m.content | trim) + '<turn|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}
"""

GEMMA = Family(
    "gemma",
    "gemma",
    _jinja(_GEMMA),
    ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
     "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
    eos="<turn|>",
)  # fmt: skip

CHATML = Family("chatml", "hermes", CHATML_TEMPLATE, CHATML_SPECIAL, CHATML_MARKERS)

_ONE = """'{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}'"""
_LIST = "{%- if m.tool_calls %}{{ 'OPEN[' }}{% for c in m.tool_calls %}{{ ONE }}{{ ', ' if not loop.last }}{% endfor %}{{ ']CLOSE' }}{% endif %}"


def _listed(
    name: str, opening: str, closing: str, one: str = _ONE, *, special: tuple[str, ...] | None = None
) -> Family:
    """ChatML with a JSON list of calls between two markers."""
    calls = _LIST.replace("OPEN", opening).replace("CLOSE", closing).replace("ONE", one)
    tokens = tuple(t for t in (opening, closing) if t.startswith("<")) if special is None else special
    header = f"Call tools as {opening}[...]{closing}"
    return Family(name, name, _chatml(header, calls, think=""), (*CHATML_SPECIAL, *tokens), reasons=False)


def _each(name: str, calls: str, *tokens: str, header: str = "", think: str = "") -> Family:
    """ChatML with `calls` for each call."""
    calls = "{%- for c in m.tool_calls %}" + calls + "{%- endfor %}"
    return Family(name, name, _chatml(header, calls, think=think), (*CHATML_SPECIAL, *tokens), reasons=bool(think))


LISTED = (
    _listed("granite", "<|tool_call|>", ""),
    _listed("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
    _listed("functools", "functools", ""),
    _listed("hunyuan", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("xlam", "", ""),
    _listed(
        "apertus", "<|tools_prefix|>", "<|tools_suffix|>",
        "'{\"' + c.function.name + '\": ' + (c.function.arguments | tojson) + '}'",
    ),
    _listed(
        "cohere", "<|START_ACTION|>", "<|END_ACTION|>",
        "'{\"tool_call_id\": \"0\", \"tool_name\": \"' + c.function.name + '\", \"parameters\": ' + (c.function.arguments | tojson) + '}'",
    ),
    _each("gigachat", "{{- '<|function_call|>' + " + _ONE + " }}", "<|function_call|>"),
    _each("internlm", "{{- '<|action_start|><|plugin|>\\n' + " + _ONE + " + '<|action_end|>' }}", "<|action_start|>", "<|plugin|>", "<|action_end|>"),
    _each(
        "seed_oss",
        "{{- '<seed:tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments | items %}"
        "{{- '<parameter=' + k + '>' }}{{ v if v is string else v | string }}{{ '</parameter>\\n' }}{% endfor %}"
        "{{- '</function>\\n</seed:tool_call>' }}",
        "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
        think=_THINK.replace("think>", "seed:think>"),
    ),
    _each("functionary_v31", "{{- '<function=' + c.function.name + '>' + (c.function.arguments | tojson) + '</function>' }}"),
    Family(
        "lfm2",
        "lfm2",
        _chatml(
            "", "{%- if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
            "{%- for k, v in c.function.arguments | items %}{{ ', ' if not loop.first }}{{ k + '=' + (v | tojson) }}{% endfor %}"
            "{{- ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}", think="",
        ),
        (*CHATML_SPECIAL, "<|tool_call_start|>", "<|tool_call_end|>"),
        reasons=False,
    ),
    Family(
        "deepseek_v32",
        "deepseek_v32",
        _chatml(
            "",
            "{%- if m.tool_calls %}{{ '<｜DSML｜function_calls>\\n' }}{% for c in m.tool_calls %}"
            "{{- '<｜DSML｜invoke name=\"' + c.function.name + '\">\\n' }}{% for k, v in c.function.arguments | items %}"
            "{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' }}"
            "{{- v if v is string else v | tojson }}{{ '</｜DSML｜parameter>\\n' }}{% endfor %}{{ '</｜DSML｜invoke>\\n' }}"
            "{%- endfor %}{{ '</｜DSML｜function_calls>' }}{% endif %}",
        ),
        (*CHATML_SPECIAL, "｜DSML｜"),
        CHATML_MARKERS,
    ),
)  # fmt: skip
"""ChatML with the calls of other families."""

LLAMA4_JSON = Family(
    "llama4_json",
    "llama4_json",
    LLAMA3_JSON.template.replace("start_header_id", "header_start").replace("end_header_id", "header_end").replace("eot_id", "eot")
    .replace("{%- for c in m.tool_calls %}", "{{- '<|python_start|>' + m.content + '<|python_end|>' if m.content }}{%- for c in m.tool_calls %}")
    .replace("{{- '; ' if not loop.first }}", "{{- '' }}"),
    ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_start|>", "<|python_end|>"),
    eos="<|eot|>",
    reasons=False,
)  # fmt: skip

FUNCTIONARY_V32 = Family(
    "functionary_v32",
    "functionary_v32",
    _jinja("""
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nWrite >>>all or >>>name.' }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '>>>all\\n' + m.content if m.content or not m.tool_calls }}
{%- for c in m.tool_calls %}{{ '>>>' + c.function.name + '\\n' + (c.function.arguments | tojson) }}{% endfor %}{{ '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n>>>' }}{% endif %}
"""),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    eos="<|eot_id|>",
    reasons=False,
)

MINIMAX_M3 = Family(
    "minimax_m3",
    "minimax_m3",
    _jinja("""
{%- set mark = ']<]minimax[>[' %}
{%- macro show(v) %}
{%- if v is mapping %}{% for k, x in v.items() if x is not none %}{{ mark + '<' + k + '>' }}{{ show(x) }}{{ mark + '</' + k + '>' }}{% endfor %}
{%- elif v is iterable and v is not string %}{% for x in v %}{{ mark + '<item>' }}{{ show(x) }}{{ mark + '</item>' }}{% endfor %}
{%- else %}{{ v if v is string else v | tojson }}{% endif %}
{%- endmacro %}
""")
    + _chatml(
        "",
        """
{%- if m.tool_calls %}{{ mark + '<tool_call>\\n' }}
{%- for c in m.tool_calls %}{{ mark + '<invoke name="' + c.function.name + '">' }}{{ show(c.function.arguments) }}{{ mark + '</invoke>\\n' }}
{%- endfor %}{{ mark + '</tool_call>' }}{% endif %}
""",
        think="{{- '<mm:think>' + m.reasoning_content if m.reasoning_content }}{{ '</mm:think>' }}",
    ),
    (*CHATML_SPECIAL, "]<]minimax[>["),
    ("<mm:think>", "</mm:think>"),
)

MINICPM5 = Family(
    "minicpm5",
    "minicpm5",
    _chatml(
        '<function name="NAME"><param name="KEY">VALUE</param></function>',
        """
{%- for c in m.tool_calls %}{{ '<function name="' + c.function.name + '">' }}
{%- for k, v in c.function.arguments.items() %}{{ '<param name="' + k + '">' }}
{%- if v is string and ('<' in v or '&' in v or '\\n' in v) %}{{ '<![CDATA[' + v + ']]>' }}{% else %}{{ v }}{% endif %}{{ '</param>' }}
{%- endfor %}{{ '</function>' }}
{%- endfor %}
""",
    ),
    CHATML_SPECIAL,
    CHATML_MARKERS,
)

MUSE_GLIMMER = Family(
    "muse_glimmer",
    "muse_glimmer",
    _jinja("""
{{- '<|start|>system<|message|>You are a model.' }}{% if tools %}{{ ' Use <atem:function_calls>. ' + (tools | tojson) }}{% endif %}{{ '<|eot|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content is string %}{{ '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{% endif %}
{%- if m.content or not m.tool_calls %}{{ '<|start|>assistant to=user<|message|>' + m.content + ('<|eom|>' if m.tool_calls else '<|eot|>') }}{% endif %}
{%- for c in m.tool_calls %}
{{- '<|start|>assistant to=' + c.function.name + '<|message|><atem:function_calls>\\n<atem:invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<atem:parameter name="' + k + '">' + (v if v is string else v | tojson) + '</atem:parameter>\\n' }}
{%- endfor %}{{ '</atem:invoke>\\n</atem:function_calls>' + ('<|eot|>' if loop.last else '<|eom|>') }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{ '<|start|>tool ' + (m.name or m.tool_call_id) + '<|message|>' + m.content + '<|eot|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""),
    ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    eos="<|eot|>",
)

FAMILIES = (
    CHATML, QWEN25, QWEN3_CODER, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, GLM, KIMI_K2,
    HARMONY, MUSE_GLIMMER, MINIMAX_M2, MINIMAX_M3, MINICPM5, GEMMA, LLAMA4_JSON, FUNCTIONARY_V32, *LISTED,
)  # fmt: skip
