"""Hostile text on a terminal: escapes, direction marks and control characters become visible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.view.plain import plain
from molt.view.tables import print_box, print_table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb", "a\\x0db"),
        ("\x07\x08", "\\x07\\x08"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\x9b2J", "\\x9b2J"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("héllo 中文", "héllo 中文"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("line\u2028break", "line\\u2028break"),
    ],
)
def test_hidden_characters_are_written_out(text, shown) -> None:
    assert plain(text) == shown


@given(st.text(st.characters(codec=None)))
def test_nothing_that_steers_a_terminal_passes(text) -> None:
    shown = plain(text)
    assert all(char.isprintable() or char in "\t\n" for char in shown)
    shown.encode()


def test_long_text_is_cut() -> None:
    assert plain("abcdef", limit=4) == "abc…"


def test_markup_in_cells_is_text(capsys) -> None:
    print_table(("[bold]name[/bold]",), [("[red]x[/red] :smile: \x1b[2J",)])
    out = capsys.readouterr().out
    assert "[bold]name[/bold]" in out
    assert "[red]x[/red] :smile: \\x1b[2J" in out
    assert "\x1b" not in out


def test_box_keeps_hostile_text_as_text(capsys) -> None:
    print_box("Error", "[link=evil]x[/link]\x1b]8;;http://evil\x07")
    err = capsys.readouterr().err
    assert "[link=evil]x[/link]\\x1b]8;;http://evil\\x07" in err
