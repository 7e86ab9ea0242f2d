"""Stop strings: nothing of one leaves, whatever the pieces in which text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text import StopStrings


def run(stop: list[str], pieces: list[str], include_stop_str: bool = False) -> tuple[list[str], bool]:
    strings = StopStrings(stop, include_stop_str)
    sent = []
    for piece in pieces:
        text, is_stopped = strings.push(piece)
        sent.append(text)
        if is_stopped:
            return sent, True
    return [*sent, strings.flush()], False


def test_no_part_of_a_stop_string_is_sent_before_it_completes() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "GHI", "JKL"]) == (["ABC", "", "", ""], True)


def test_held_text_is_released_when_the_stop_string_does_not_come() -> None:
    assert run(["DEFGHIJ"], ["ABCDEF", "GHX"]) == (["ABC", "DEFGHX", ""], False)
    assert run(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], False)


def test_a_stop_string_inside_a_piece_cuts_the_piece() -> None:
    assert run(["\n"], ["one\ntwo"]) == (["one"], True)


def test_a_stop_string_is_included_whole_when_asked_for() -> None:
    assert run(["END"], ["a E", "ND b"], include_stop_str=True) == (["a ", "END"], True)


def test_of_overlapping_stop_strings_the_one_that_completes_first_wins() -> None:
    assert run(["xyz", "y"], ["axyz"]) == (["ax"], True)
    assert run(["y", "xy"], ["axy"]) == (["a"], True)
    assert run(["late", "early"], ["an early and a late one"]) == (["an "], True)


def test_a_stop_string_that_repeats_its_own_beginning_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


def test_nothing_leaves_after_the_stop_string() -> None:
    strings = StopStrings(["b"])
    assert strings.push("abc") == ("a", True)
    assert strings.push("more") == ("", True)
    assert strings.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
    include=st.booleans(),
)
def test_the_pieces_do_not_matter_and_the_earliest_end_wins(stop: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    sent, is_stopped = run(stop, pieces, include)
    assert is_stopped == bool(ends)
    if not ends:
        assert "".join(sent) == text
        return
    end = min(ends)
    longest = max(len(string) for string in stop if text[:end].endswith(string))
    assert "".join(sent) == text[: end if include else end - longest]


@given(pieces=st.lists(st.text("abc", max_size=4), max_size=10))
def test_no_more_is_held_than_could_begin_a_stop_string(pieces: list[str]) -> None:
    strings = StopStrings(["abab", "ca"])
    sent = arrived = ""
    for piece in pieces:
        text, is_stopped = strings.push(piece)
        sent, arrived = sent + text, arrived + piece
        if is_stopped:
            return
        held = arrived[len(sent) :]
        assert arrived == sent + held
        assert held == "" or any(string.startswith(held) for string in ("abab", "ca"))
