"""Chat templates that a recipe can name. Each writes the format that its family of models was trained on."""

from __future__ import annotations

from collections.abc import Mapping

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_ALPACA = """\
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{- message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}
"""

_MISTRAL = """\
{{- bos_token }}
{%- set system = namespace(text='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set system.text = message['content'] + '\\n\\n' %}
{%- elif message['role'] == 'user' %}
{{- '[INST] ' + system.text + message['content'] + ' [/INST]' }}
{%- set system.text = '' %}
{%- elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{%- endfor %}
"""

_EXAONE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '[|system|][|endofturn|]\\n' }}
{%- endif %}
{{- '[|' + message['role'] + '|]' + message['content'] }}
{{- '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[|assistant|]' }}
{%- endif %}
"""

TEMPLATES: Mapping[str, str] = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""Jinja by name."""
