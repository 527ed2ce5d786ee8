"""`tokenspeed serve`: parsers and built-in chat templates by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_serve import folder, started  # noqa: F401  the model's folder, and what takes the server's place

from tokenspeed.catalog.chat_templates import builtin_chat_templates
from tokenspeed.cli.main import main


def test_names_reach_the_server(folder, started):  # noqa: F811
    argv = ["serve", folder, "--load-format", "dummy", "--chat-template", "chatml-tools", "--reasoning-parser", "qwen3"]
    assert main([*argv, "--tool-call-parser", "hermes"]) == 7
    (_, server, _) = started[0]
    assert server.chat_template == builtin_chat_templates()["chatml-tools"]
    assert (server.reasoning_parser, server.tool_call_parser) == ("qwen3", "hermes")


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser"])
def test_a_misspelled_parser_ends_before_the_model_is_loaded(folder, started, capsys, flag):  # noqa: F811
    assert main(["serve", folder, "--load-format", "dummy", flag, "qwen9"]) == 2
    error = capsys.readouterr().err
    assert f"{flag} 'qwen9' does not exist; choose one of auto, " in error and "kimi_k3" in error
    assert not started


def test_an_unknown_template_names_ours(folder, started, capsys):  # noqa: F811
    assert main(["serve", folder, "--load-format", "dummy", "--chat-template", "chatmll"]) == 2
    assert "none of chatml, chatml-tools" in capsys.readouterr().err


def test_the_models_own_templates_have_names(folder, started, capsys):  # noqa: F811
    """The bug: only ours were found, so that of a model with several and no default none could be chosen."""
    named = [{"name": "rag", "template": "{{ messages }}"}, {"name": "x", "template": "{{ tools }}"}]
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    argv = ["serve", folder, "--load-format", "dummy", "--chat-template"]
    assert main([*argv, "rag"]) == 7
    assert started[0][1].chat_template == "{{ messages }}"
    assert main([*argv, "raag"]) == 2
    assert "none of chatml, chatml-tools, rag, x" in capsys.readouterr().err
