"""Tokenizers: lossy ones are refused by name, folders without one are refused, ids have no additions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from molt.agents.probe import check_tokenizer, lost_characters
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.config import DataSettings
from molt.data.tiny import make_tokenizer
from molt.errors import SettingError


def lossy_tokenizer() -> Tokenizer:
    """A byte-level BPE without a whole byte alphabet and without an unknown token, as real test assets are."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    inner = Inner(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="!"), name="lossy", digest="0" * 32)


def test_lossy_tokenizer_is_refused_with_the_lost_characters() -> None:
    lost = lost_characters(lossy_tokenizer())
    assert all(character in lost for character in " \nö日😀\x1b") and "a" not in lost
    with pytest.raises(SettingError, match=r"its tokenizer loses \d+ characters .*SPACE"):
        check_tokenizer(lossy_tokenizer())


def test_tokenizer_that_joins_blanks_is_refused(tokenizer: Tokenizer) -> None:
    from tokenizers import Regex, normalizers
    from transformers import PreTrainedTokenizerFast

    inner = pickle.loads(pickle.dumps(tokenizer.inner.backend_tokenizer))
    inner.normalizer = normalizers.Replace(Regex(" {2,}"), " ")  # indented code would be flat
    joining = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner), name="joining", digest="0" * 32)
    with pytest.raises(SettingError, match=r"makes 'lines.n.n two blanksa' of 'lines.n.n  two blanksa'"):
        check_tokenizer(joining)
    check_tokenizer(tokenizer)


def test_whole_byte_alphabet_loses_nothing(tokenizer: Tokenizer) -> None:
    assert lost_characters(tokenizer) == ""


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="it holds no tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(SettingError, match="no such folder"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingError, match="its tokenizer cannot be loaded"):
        Tokenizer.load(tmp_path)


def test_model_without_template_is_refused_unless_text_is_plain(tmp_path: Path) -> None:
    import molt.agents as agents

    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(SettingError, match="has no chat template"):
        ChatRenderer.for_agent(tokenizer, agents.AgentRunner, DataSettings())
    plain = ChatRenderer.for_agent(tokenizer, agents.AgentRunner, DataSettings(apply_chat_template=False))
    layout = plain.layout([{"role": "user", "content": "1+1="}], {})
    assert tokenizer.decode(layout.gaps[0].token_ids) == "1+1="


def test_digest_changes_with_the_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "a")
    make_tokenizer(tmp_path / "b")
    assert Tokenizer.load(tmp_path / "a").digest == Tokenizer.load(tmp_path / "b").digest
    config = tmp_path / "b" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"<|pad|>"', '"<|user|>"'))
    assert Tokenizer.load(tmp_path / "a").digest != Tokenizer.load(tmp_path / "b").digest


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"generation_config.json": '{"eos_token_id": [1, 5]}', "config.json": '{"eos_token_id": 3}'}, (1, 5)),
        ({"generation_config.json": "{}", "config.json": '{"eos_token_id": [1, 3]}'}, (1, 3)),
        ({"config.json": '{"text_config": {"eos_token_id": 3}}'}, (1, 3)),
        ({"config.json": '{"model_type": "qwen3"}'}, (1,)),
    ],
)
def test_ends_that_the_model_names_end_a_call(tmp_path: Path, files: dict[str, str], stops: tuple[int, ...]) -> None:
    make_tokenizer(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert ChatRenderer(Tokenizer.load(tmp_path)).stop_token_ids == stops
