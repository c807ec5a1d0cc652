"""The path "words" of `prove-family`: random calls through a folder's template, and planted faults."""

import shutil

import pytest
from chat_templates import SPECIAL, TEMPLATES

from rlinf_vl.__main__ import main
from rlinf_vl.envs.call_forms.tagged import ParameterCalls
from rlinf_vl.models.families import family_of
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.verify.prove.words import CONVERSATIONS, word_figures

#: Those whose marks are ordinary tokens of the toy's tokenizer, and whose turns end with its token.
FAMILIES = [name for name, (_, form) in TEMPLATES.items() if form and name not in SPECIAL]


@pytest.fixture
def folder_of(tmp_path, toy_folder):
    def make(family):
        shutil.copytree(toy_folder, tmp_path / family)
        (tmp_path / family / "chat_template.jinja").write_text(TEMPLATES[family][0])
        return tmp_path / family

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_proven(family, folder_of):
    assert word_figures(family_of("qwen3_vl"), folder_of(family)) == (0.0, 0.0)


def test_the_verb_proves_them_or_says_why_not(folder_of, capsys):
    assert main(["prove-family", str(folder_of("qwen3_5")), "--paths", "words"]) == 0
    assert "0.0e+00 / 0.0e+00" in capsys.readouterr().out
    assert main(["prove-family", str(folder_of("internvl")), "--paths", "words"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "the chat template shows no calls" in out
    assert main(["prove-family", str(folder_of("deepseek")), "--paths", "words"]) == 1


def test_planted_faults_are_found(folder_of, monkeypatch):
    folder, sound = folder_of("qwen3_5"), ParameterCalls.read
    # Texts become what they look like: the schema is not asked.
    monkeypatch.setattr(ParameterCalls, "read", lambda self, text, tools=(): sound(self, text))
    with pytest.raises(ValueError, match="a form that is not known"):
        word_figures(family_of("qwen3_vl"), folder)
    monkeypatch.undo()
    follow = Renderer.follow
    monkeypatch.setattr(Renderer, "follow", lambda self, *args: (follow(self, *args)[0][1:], None))
    assert word_figures(family_of("qwen3_vl"), folder) == (0.0, float(CONVERSATIONS))
