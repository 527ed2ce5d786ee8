"""`auto` finds a model's formats by architecture and template; names are checked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tokenspeed.protocol.errors import ConfigError
from tokenspeed.text.parsers.interface import ParseContext
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats
from tokenspeed.text.parsers.select import select_reasoning, select_tools

# The parts of the public chat templates that tell the families apart, as Jinja source.
QWEN_JSON = (
    r"""{{- '<|im_start|>system\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}' }}"""
)
QWEN_XML = r"""<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>"""
QWEN3 = QWEN_JSON + r"""{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
QWEN3_THINKING = QWEN_JSON + r"""</think>{{- '<|im_start|>assistant\n<think>\n' }}"""
QWEN35 = QWEN_XML + r"""<|im_start|>{%- if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"""
R1 = (
    r"""{{'<｜tool▁calls▁begin｜>function<｜tool▁sep｜>' + name + '\n```json'}}</think>{{'<｜Assistant｜><think>\n'}}"""
)
V31 = (
    r"""{% if thinking %}{{'<｜Assistant｜><think>'}}{% else %}{{'<｜Assistant｜></think>'}}{% endif %}<｜tool▁sep｜>"""
)
KIMI_K2 = r"""<|im_middle|><|tool_calls_section_begin|>"""
KIMI_THINKING = KIMI_K2 + "<think></think>"
GLM = r"""[gMASK]<sop><tool_call>{function-name}<arg_key>k</arg_key><think></think>{{ enable_thinking }}"""
LLAMA = r"""Environment: ipython {"name": function name, "parameters": dictionary of argument name and its value}"""
LLAMA4 = r"""[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"""
MISTRAL = r"""[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS]"""
GPT_OSS = r"""<|start|>assistant<|channel|>analysis<|message|>"""
K3 = r"""{%- macro open_tag(t) %}<|open|>{{ t }}<|sep|>{% endmacro %}<|close|>"""
DSML = r"""<｜DSML｜function_calls><｜Assistant｜></think>{{ thinking }}"""


@dataclass(frozen=True)
class Model:
    architecture: str


@pytest.mark.parametrize(
    ("architecture", "template", "reasoning", "tools"),
    [
        ("LlamaForCausalLM", "", "passthrough", "passthrough"),
        ("LlamaForCausalLM", "{{ messages }}<|im_start|>", "passthrough", "passthrough"),
        ("Qwen2ForCausalLM", QWEN_JSON, "passthrough", "qwen"),
        ("Qwen3ForCausalLM", QWEN3, "qwen3", "qwen"),
        ("Qwen3MoeForCausalLM", QWEN3_THINKING, "qwen3_thinking", "qwen"),
        ("Qwen3MoeForCausalLM", QWEN_XML, "passthrough", "qwen_coder"),
        ("Qwen3_5ForCausalLM", QWEN35, "qwen3", "qwen_coder"),
        ("DeepseekV3ForCausalLM", R1, "deepseek_r1", "deepseek"),
        ("Qwen2ForCausalLM", R1, "deepseek_r1", "deepseek"),
        ("DeepseekV3ForCausalLM", V31, "deepseek_v31", "deepseek31"),
        ("DeepseekV32ForCausalLM", "", "deepseek_v31", "deepseek32"),
        ("DeepseekV3ForCausalLM", DSML, "deepseek_v31", "deepseek32"),
        ("DeepseekV3ForCausalLM", KIMI_K2, "passthrough", "kimik2"),
        ("DeepseekV3ForCausalLM", KIMI_THINKING, "kimi_thinking", "kimik2"),
        ("KimiK25ForConditionalGeneration", KIMI_THINKING, "kimi_k25", "kimik2"),
        ("KimiK3ForConditionalGeneration", "", "kimi_k3", "kimi_k3"),
        ("Unknown", K3, "kimi_k3", "kimi_k3"),
        ("KimiVLForConditionalGeneration", "<|im_middle|>", "kimi", "passthrough"),
        ("Glm4MoeForCausalLM", GLM, "glm45", "glm45_moe"),
        ("LlamaForCausalLM", LLAMA, "passthrough", "llama"),
        ("Llama4ForConditionalGeneration", LLAMA4, "passthrough", "pythonic"),
        ("MistralForCausalLM", MISTRAL, "passthrough", "mistral"),
        ("GptOssForCausalLM", "", "gpt-oss", "gpt-oss"),
        ("Unknown", GPT_OSS, "gpt-oss", "gpt-oss"),
        ("Unknown", "x</think>", "base", "passthrough"),
    ],
)
def test_auto(architecture, template, reasoning, tools):
    model = Model(architecture)
    chosen = select_reasoning("auto", model, template)
    assert chosen.format.names[0] == reasoning
    assert architecture in chosen.reason
    chosen_tools = select_tools("auto", model, template)
    assert chosen_tools.format.names[0] == tools
    assert architecture in chosen_tools.reason


def test_every_name_selects_its_format():
    for name, one in reasoning_formats().items():
        assert select_reasoning(name, Model("LlamaForCausalLM"), "").format is one
    for name, tool in tool_formats().items():
        assert select_tools(name, Model("LlamaForCausalLM"), "").format is tool


REASONING_NAMES = (
    *("base", "deepseek_r1", "deepseek_v31", "qwen3", "qwen3_thinking", "kimi", "kimi_k25", "kimi_thinking", "kimi_k3"),
    *("glm45", "gpt-oss", "passthrough"),
)
TOOL_NAMES = (
    *("kimik2", "kimi_k3", "qwen", "qwen_coder", "qwen_xml", "json", "pythonic", "llama", "mistral", "deepseek"),
    *("deepseek31", "deepseek32", "deepseek_v4", "glm45_moe", "glm47_moe", "gpt-oss", "passthrough"),
)


def test_the_promised_names_exist():
    assert set(REASONING_NAMES) <= set(reasoning_formats())
    assert set(TOOL_NAMES) <= set(tool_formats())


def test_base_on_a_model_of_channels_means_its_own_format():
    """The public recipe passes `--reasoning-parser base` for gpt-oss."""
    chosen = select_reasoning("base", Model("GptOssForCausalLM"), "")
    assert chosen.format.names[0] == "gpt-oss"
    assert "'base' was asked for" in chosen.reason
    assert select_reasoning("base", Model("Qwen3ForCausalLM"), QWEN3).format.names[0] == "base"
    assert select_reasoning("qwen3", Model("GptOssForCausalLM"), "").format.names[0] == "qwen3"


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(
        ConfigError, match=r"--reasoning-parser 'qwen9' does not exist; choose one of auto, base, .*qwen3"
    ):
        select_reasoning("qwen9", Model("x"), "")
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'nope' does not exist; choose one of auto, .*kimik2"):
        select_tools("nope", Model("x"), "")


def test_special_tokens_are_asked_for_where_marks_are_such():
    needs = {one.names[0] for one in tool_formats().values() if one.needs_special_tokens}
    assert {"gpt-oss", "kimi_k3", "kimik2", "mistral", "llama", "deepseek"} <= needs
    assert not needs & {"qwen", "qwen_coder", "json", "passthrough"}
    assert reasoning_formats()["gpt-oss"].needs_special_tokens
    assert reasoning_formats()["kimi_k3"].needs_special_tokens


def test_end_markers_end_the_reasoning():
    for one in reasoning_formats().values():
        if one.end_marker is None:
            assert one.names == ("passthrough",)
            continue
        prompt = {"gpt-oss": "<|start|>assistant", "kimi_k3": "<|open|>think<|sep|>", "kimi": "◁think▷"}
        parser = one.make(ParseContext(prompt=prompt.get(one.names[0], "<think>")))
        if one.names[0] == "gpt-oss":
            parser.feed("<|channel|>analysis<|message|>")
        parser.feed("x")
        assert parser.in_reasoning
        parser.feed(one.end_marker)
        assert not parser.in_reasoning
