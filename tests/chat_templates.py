"""Small chat templates in the forms of public checkpoints, by family. None is a copy of a checkpoint's."""

_PARTS = (
    "{%- macro say(content) -%}{%- if content is string -%}{{ content }}{%- elif content -%}"
    "{%- for part in content -%}{%- if part.type in ['image', 'image_url'] -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_TOOLS = (
    "{%- if tools -%}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif -%}"
)
_LAST = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_RESULTS = (
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    "{{ '\n<tool_response>\n' }}{{ say(m.content) }}{{ '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"
)
_OTHERS = (
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' }}{{ say(m.content) }}{{ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
)
_CALLS = (
    "{%- if m.tool_calls -%}{%- for call in m.tool_calls -%}{%- set f = call.function -%}"
    "BEFORE{%- if not loop.first -%}BETWEEN{%- endif -%}CALL{%- endfor -%}{%- endif -%}"
)


def _chatml(call: str, between: str = "{{ '\n' }}", before: str = "", thinks: str = "last") -> str:
    """Return a template in the form of ChatML; `thinks`: whether thoughts are of the last answer, all or none."""
    calls = _CALLS.replace("BEFORE", before).replace("BETWEEN", between).replace("CALL", call)
    shown = (
        "{%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}"
        "{%- set text = say(m.content) -%}{%- if '</think>' in text and not thought -%}"
        "{%- set thought = text.split('</think>')[0].split('<think>')[-1] | trim -%}"
        "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    )
    shown += {
        "last": "{%- if loop.index0 > ns.last -%}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}",
        "all": "{%- if thought -%}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}",
        "none": "",
    }[thinks]
    answer = (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
        + shown
        + ("{{ say(m.content) }}" if thinks == "none" else "{{ text }}")
        + calls
        + "{{ '<|im_end|>\n' }}"
    )
    prompt = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    return _PARTS + _TOOLS + _LAST + answer + _RESULTS + _OTHERS + prompt


_JSON = (
    '{{ \'<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{%- if f.arguments is string -%}{{ f.arguments }}{%- else -%}{{ f.arguments | tojson }}{%- endif -%}"
    "{{ '}\n</tool_call>' }}"
)
_FIRST = "{%- if loop.first and m.content -%}{{ '\n' }}{%- endif -%}"
_XML = (
    "{{ '<tool_call>\n<function=' + f.name + '>\n' }}"
    "{%- for key, value in f.arguments | items -%}{{ '<parameter=' + key + '>\n' }}"
    "{{ VALUE }}{{ '\n</parameter>\n' }}{%- endfor -%}{{ '</function>\n</tool_call>' }}"
)
_STRINGS = (
    "value | tojson if value is mapping or (value is sequence and value is not string)"
    " else value | string"
)
_JSON_VALUES = "value if value is string else value | tojson"
_PAIRS = (
    "{{ '<tool_call>' + f.name }}{%- for key, value in f.arguments.items() -%}"
    "SEP<arg_key>{{ key }}</arg_key>SEP<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>"
    "{%- endfor -%}SEP</tool_call>"
)
_MISTRAL = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- if tools and loop.last -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}"
    "[INST]{{ say(m.content) }}[/INST]"
    "{%- elif m.role == 'assistant' -%}THOUGHTS{{ say(m.content) }}{%- if m.tool_calls -%}CALLS{%- endif -%}"
    "<|im_end|>{%- elif m.role == 'tool' -%}"
    "{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}"
    "{{ raise_exception('ids have nine characters') }}{%- endif -%}"
    "[TOOL_RESULTS]{{ say(m.content) }}[/TOOL_RESULTS]{%- endif -%}{%- endfor -%}"
)
_MISTRAL_LIST = (
    "{{ '[TOOL_CALLS] [' }}{%- for call in m.tool_calls -%}"
    "{%- if call.id is not defined or call.id | length != 9 -%}"
    "{{ raise_exception('ids have nine characters') }}{%- endif -%}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%}]"
)
_MISTRAL_ARGS = (
    "{%- for call in m.tool_calls -%}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{%- if call.function.arguments is string -%}{{ call.function.arguments }}{%- else -%}"
    "{{ call.function.arguments | tojson }}{%- endif -%}{%- endfor -%}"
)
_MAGISTRAL = "{%- if m.reasoning_content -%}[THINK]{{ m.reasoning_content }}[/THINK]{%- endif -%}"
_GEMMA_VALUE = (
    '{%- macro put(value) -%}{%- if value is string -%}<|"|>{{ value }}<|"|>'
    "{%- elif value is boolean -%}{{ 'true' if value else 'false' }}"
    "{%- elif value is mapping -%}{{ '{' }}{%- for k, v in value | dictsort -%}{{ k }}:{{ put(v) }}"
    "{%- if not loop.last -%},{%- endif -%}{%- endfor -%}{{ '}' }}"
    "{%- elif value is sequence -%}[{%- for v in value -%}{{ put(v) }}{%- if not loop.last -%},{%- endif -%}"
    "{%- endfor -%}]{%- else -%}{{ value }}{%- endif -%}{%- endmacro -%}"
)
_GEMMA = (
    _GEMMA_VALUE
    + "{%- for m in messages -%}{%- set role = 'model' if m.role == 'assistant' else m.role -%}"
    "<|turn>{{ role + '\n' }}{%- if m.reasoning_content -%}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}"
    "<|tool_call>call:{{ call.function.name }}{{ put(call.function.arguments) }}<tool_call|>{%- endfor -%}"
    "{{ say(m.content) }}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|turn>{{ 'model\n' }}{%- endif -%}"
)
_LLAMA = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n\n' }}{%- if m.tool_calls -%}"
    "{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call at once') }}{%- endif -%}"
    '{%- set f = m.tool_calls[0].function -%}{{ \'{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{ f.arguments | tojson }}{{ '}' }}{%- else -%}{{ say(m.content) }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n\n' }}{%- endif -%}"
)
_PYTHON_VALUE = (
    "{%- macro py(value) -%}{%- if value is mapping or value is string -%}{{ value | tojson }}"
    "{%- else -%}{{ value | string }}{%- endif -%}{%- endmacro -%}"
)
_PYTHON = (
    "{%- if loop.first -%}<|tool_call_start|>[{%- else -%}{{ ', ' }}{%- endif -%}{{ f.name }}("
    "{%- for key, value in f.arguments.items() -%}{{ key }}={{ py(value) }}"
    "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%})"
    "{%- if loop.last -%}]<|tool_call_end|>{%- endif -%}"
)
#: DeepSeek's form, which no reader knows; arguments are texts.
_SECTIONS = (
    "{%- if loop.first -%}<|calls_begin|>{%- endif -%}<|call_begin|>{{ f.name }}<|call_sep|>"
    "{{ f.arguments }}<|call_end|>"
)

#: Family → (template, the beginning of its form's name; None: not known; "": it shows no calls).
TEMPLATES: dict[str, tuple[str, str | None]] = {
    "qwen3_vl": (_chatml(_JSON, before=_FIRST, thinks="none"), "JSON in"),
    "qwen3": (_chatml(_JSON, before=_FIRST), "JSON in"),
    "hermes": (_chatml(_JSON, before=_FIRST, thinks="all"), "JSON in"),
    "qwen3_5": (_chatml(_XML.replace("VALUE", _STRINGS), before=_FIRST * 2), "<function="),
    "qwen3_6": (
        _chatml(_XML.replace("VALUE", _JSON_VALUES), before=_FIRST * 2, thinks="all"),
        "<function=",
    ),
    "glm4_5": (_chatml(_PAIRS.replace("SEP", "{{ '\n' }}")), "<arg_key><arg_value> in <tool_call>"),
    "glm4_7": (
        _chatml(_PAIRS.replace("SEP", ""), between=""),
        "<arg_key><arg_value> in <tool_call>, in one line",
    ),
    "pixtral": (
        _PARTS + _MISTRAL.replace("CALLS", _MISTRAL_LIST).replace("THOUGHTS", ""),
        "a JSON list",
    ),
    "magistral": (
        _PARTS + _MISTRAL.replace("CALLS", _MISTRAL_ARGS).replace("THOUGHTS", _MAGISTRAL),
        "[TOOL_CALLS]name",
    ),
    "gemma4": (_PARTS + _TOOLS + _GEMMA, "call:name"),
    "llama4": (_PARTS + _TOOLS + _LLAMA, "a reply that is JSON"),
    "lfm2_vl": (_PYTHON_VALUE + _chatml(_PYTHON, between=""), "a list of Python calls in"),
    "internvl": (_chatml("", between="", thinks="none"), ""),
    "deepseek": (_chatml(_SECTIONS, between=""), None),
}
#: Marks that are special tokens in the checkpoints of these families.
SPECIAL = {
    "pixtral": ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[INST]", "[/INST]"],
    "magistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>"],
    "lfm2_vl": ["<|tool_call_start|>", "<|tool_call_end|>"],
}
