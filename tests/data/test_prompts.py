"""Prompt sets: every shape that data comes in, and every way in which a file can be wrong, with file and line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from molt.config import DataSettings
from molt.data.prompts import PromptSet
from molt.errors import DataError, SettingError

FIXTURES = Path(__file__).parent / "fixtures"
QUESTION = {"input": "1+1", "label": "2"}


def load(file: Path, **settings) -> PromptSet:
    return PromptSet.load(file, DataSettings(**settings))


def write(file: Path, *lines: str | dict) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_questions_and_answers_of_gsm8k_are_prompts() -> None:
    prompts = load(FIXTURES / "gsm8k_8.jsonl", input_key="question", label_key="answer")
    assert len(prompts) == 8
    assert prompts[0].messages[0]["content"].startswith("Janet")
    assert prompts[0].label.endswith("#### 18")
    assert [prompt.prompt_index for prompt in prompts] == list(range(8))


def test_messages_and_dotted_keys_are_prompts() -> None:
    assert load(FIXTURES / "messages_answer.jsonl", label_key="answer")[0].label == "42"
    nested = load(FIXTURES / "nested_input.jsonl", messages_key="responses_create_params.input", label_key="expected_answer")
    assert nested[0].messages == ({"role": "user", "content": "What is the capital of France?"},)
    assert "follow_ups" in nested[0].extras and "responses_create_params" in nested[0].extras


def test_one_row_as_string_messages_and_parts_has_one_normal_form(tmp_path: Path) -> None:
    user = {"role": "user", "content": "1+1"}
    rows = [
        {"input": "1+1"},
        {"messages": [user]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]},
        {"input": [user]},
    ]
    prompts = load(write(tmp_path / "rows.jsonl", *rows))
    assert {json.dumps(prompt.messages) for prompt in prompts} == {json.dumps([user])}
    assert len({prompt.prompt_id for prompt in prompts}) == 1


def test_parquet_and_data_set_folders_hold_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}+1"}], "label": str(n + 1)} for n in range(5)]
    table = pa.Table.from_pylist(rows)
    jsonl = load(write(tmp_path / "rows.jsonl", *rows))
    pq.write_table(table, tmp_path / "rows.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    for number, part in enumerate((table.slice(0, 3), table.slice(3))):
        with pa.OSFile(str(saved / f"data-0000{number}-of-00002.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    pq.write_table(table, hub / "train-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 1), hub / "test-00000-of-00001.parquet")
    for path in (tmp_path / "rows.parquet", saved, tmp_path / "hub"):
        assert load(path).digest == jsonl.digest, path


def test_folder_that_lacks_one_of_its_numbered_files_is_refused(tmp_path: Path) -> None:
    for number in (0, 2):
        write(tmp_path / f"train-0000{number}-of-00003.jsonl", QUESTION)
    with pytest.raises(SettingError, match="file 00001 of 00003 is missing"):
        load(tmp_path)
    write(tmp_path / "train-00001-of-00003.jsonl", QUESTION)
    assert len(load(tmp_path)) == 3


def test_folder_of_two_variants_of_one_data_set_is_refused(tmp_path: Path) -> None:
    for variant in ("main", "socratic"):
        (tmp_path / variant).mkdir()
        write(tmp_path / variant / "train-00000-of-00001.jsonl", QUESTION)
    with pytest.raises(SettingError, match="main, socratic hold files of one name"):
        load(tmp_path)
    assert len(load(tmp_path / "main")) == 1


def test_saved_by_the_datasets_library_reads_without_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([QUESTION, QUESTION | {"input": "2+2"}]).save_to_disk(str(tmp_path / "one"))
    assert [prompt.messages[0]["content"] for prompt in load(tmp_path / "one")] == ["1+1", "2+2"]
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list([QUESTION]), "test": datasets.Dataset.from_list([QUESTION])})
    both.save_to_disk(str(tmp_path / "both"))
    assert len(load(tmp_path / "both")) == 1


def test_system_prompt_is_put_first_once(tmp_path: Path) -> None:
    rows = [QUESTION, {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], "label": "1"}]
    prompts = load(write(tmp_path / "rows.jsonl", *rows), system_prompt="Be brief.")
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Be brief.", "own"]


def test_content_names_a_prompt(tmp_path: Path) -> None:
    one = load(write(tmp_path / "a.jsonl", QUESTION, QUESTION | {"label": "3"}))
    two = load(write(tmp_path / "b.jsonl", {"label": "2", "input": "1+1"}, QUESTION | {"label": "3"}))
    assert one.digest == two.digest and one[0].prompt_id != one[1].prompt_id
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("data", "line", "said"),
    [
        (b'{"input": "x"}\n<PLACEHOLDER ROW>\n', 2, "'<PLACEHOLDER ROW>'"),
        (b'<<<<<<< HEAD\n{"input": "x"}\n', 1, "merge-conflict marker"),
        (b"<!DOCTYPE html><html>\n", 1, "an HTML page"),
        (b'{"input": "x\x00"}\n', 1, "NUL bytes"),
        (b'{"input": "x"}\n{"input": "tor', 2, "the last line is cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 1, "Git LFS pointer"),
        (b'["a", "list"]\n', 1, "a row is a JSON object"),
        (b'{"question": "x"}\n', 1, "neither data.messages_key=messages nor data.input_key=input holds a value; its keys are question"),
        (b'{"input": ""}\n', 1, "input is empty or a placeholder"),
        (b'{"input": "<PLACEHOLDER>"}\n', 1, "empty or a placeholder: '<PLACEHOLDER>'"),
        (b'{"input": 5}\n', 1, "input is a number; it must be a string or a list of messages"),
        (b'{"messages": []}\n', 1, "messages is an empty list"),
        (b'{"messages": {"role": "user"}}\n', 1, "messages is one object"),
        (b'{"messages": [{"role": "usr", "content": "x"}]}\n', 1, "messages[0].role is 'usr'"),
        (b'{"messages": [{"role": "user", "content": null}]}\n', 1, "messages[0].content is null"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]}\n',
            1,
            "messages[0].content[0].url: no such image",
        ),
        (b'{"messages": [{"role": "user", "content": [{"type": "video", "url": "x"}]}]}\n', 1, "messages[0].content[0] is of type 'video'"),
        (b'{"messages": [{"role": "assistant", "tool_calls": "f()"}]}\n', 1, "messages[0].tool_calls is a string"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}\n', 1, "messages[0].tool_calls[0] names no function"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]}\n', 1, "tool_calls[0] names no function"),
        (b'{"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}]}\n', 1, "in a message of role user"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}\n', 1, "messages ends with an assistant message"),
        (b'{"input": "x", "label": 18446744073709551616}\n', 1, "the number 18446744073709551616 is too large for 64 bits"),
        (b'{"input": "x", "label": "1"}\n{"input": "y"}\n', 2, "data.label_key=label is not there; its keys are input"),
    ],
)
def test_malformed_line_is_named_with_file_and_line(tmp_path: Path, data: bytes, line: int, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    with pytest.raises(DataError) as error:
        load(file)
    assert f"{file}:{line}: " in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(("name", "said"), [("placeholder_rows", "5 of 5 rows"), ("merge_conflict", "merge-conflict marker")])
def test_real_malformed_files_are_refused(name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(FIXTURES / f"{name}.jsonl")


def test_many_problems_are_counted_and_the_first_ones_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)7 of 8 rows are malformed.*:5: .*and 2 more"):
        load(write(tmp_path / "rows.jsonl", *["no json"] * 7, QUESTION))


def test_bom_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"input": "x"}\r\n\r\n{"input": "y"}\r\n')
    assert len(load(file)) == 2


def test_skipped_rows_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", *[QUESTION] * 18, "no json", "no json")
    assert load(file, skip_malformed=True).num_skipped == 2
    with pytest.raises(DataError, match="leaves out at most 10%"):
        load(write(tmp_path / "more.jsonl", *[QUESTION] * 17, *["no json"] * 3), skip_malformed=True)


def test_row_without_its_label_is_skipped_like_any_malformed_one(tmp_path: Path) -> None:
    rows = [QUESTION] * 19
    file = write(tmp_path / "rows.jsonl", *rows[:5], {"input": "no label"}, *rows[5:])
    with pytest.raises(DataError, match="1 of 20 rows are malformed"):
        load(file)
    prompts = load(file, skip_malformed=True)
    assert (len(prompts), prompts.num_skipped, {prompt.label for prompt in prompts}) == (19, 1, {"2"})
    assert [prompt.prompt_index for prompt in prompts] == list(range(19))


def test_label_that_is_no_number_is_absent(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input": ["a", "b"], "label": [1.0, float("nan")]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet:2: data.label_key=label is not there"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize("indent", [None, 1])
def test_file_of_one_json_list_is_its_rows(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([QUESTION, QUESTION | {"input": "2+2"}], indent=indent))
    assert [prompt.messages[0]["content"] for prompt in load(tmp_path / "rows.json")] == ["1+1", "2+2"]
    (tmp_path / "rows.json").write_text(json.dumps([QUESTION, "no row"], indent=indent))
    with pytest.raises(DataError, match=r"rows.json:2: a row is a JSON object"):
        load(tmp_path / "rows.json")


def test_columns_hold_messages_as_text_and_no_arguments_of_other_rows(tmp_path: Path) -> None:
    def asked(arguments: dict) -> dict:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "x"}, said, {"role": "tool", "content": "42"}]}

    rows = [asked({"city": "Paris"}), asked({"n": 3, "unit": {"of": "km"}})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")  # each struct of it has city, n and unit
    pq.write_table(pa.table({"messages": [json.dumps(row["messages"]) for row in rows]}), tmp_path / "texts.parquet")
    lines = load(write(tmp_path / "rows.jsonl", *rows))
    assert load(tmp_path / "rows.parquet").digest == lines.digest == load(tmp_path / "texts.parquet").digest


def test_label_key_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"input": "x"})
    assert load(file)[0].label is None
    with pytest.raises(DataError, match=r"rows.jsonl:1: data.label_key=answer is not there"):
        load(file, label_key="answer")


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\n\n")])
def test_file_without_rows_is_refused(tmp_path: Path, make) -> None:
    make(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="holds no rows"):
        load(tmp_path / "rows.jsonl")


def test_paths_that_hold_no_data_are_setting_errors(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"data.prompt_dataset=.*no such file or folder"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(SettingError, match="it holds no Parquet, JSONL or Arrow file"):
        load(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(SettingError, match=r"unknown kind of file '.csv'"):
        load(tmp_path / "rows.csv")
    write(tmp_path / "dev.jsonl", QUESTION)
    write(tmp_path / "test.jsonl", QUESTION)
    with pytest.raises(SettingError, match="splits dev, test"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["bad_page", "bad_levels"])
def test_broken_parquet_is_an_error_and_no_crash(name: str) -> None:
    with pytest.raises(DataError):
        load(FIXTURES / f"{name}.parquet")


def test_parquet_without_a_prompt_names_its_keys_and_row() -> None:
    with pytest.raises(DataError, match=r"numbers_only.parquet:1: neither .* its keys are x"):
        load(FIXTURES / "numbers_only.parquet")


def test_parquet_that_python_cannot_hold_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input": ["x"], "when": pa.array([1 << 40], pa.timestamp("s"))}), tmp_path / "rows.parquet")  # year 36812
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "rows.parquet")


def test_text_file_called_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "rows.parquet")


def test_reading_prompts_imports_no_torch() -> None:
    code = "import sys, molt.data.prompts, molt.data.tiny; print({'torch', 'transformers', 'ray', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
