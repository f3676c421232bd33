from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpserve.frontend.text.stops import StopFinder, StopPattern

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def finder(*stops: str) -> StopFinder:
    return StopFinder([StopPattern(stop) for stop in stops], False)


def ended(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: before the stop string that is complete first, the longest of those complete together; and it."""
    for end in range(len(text) + 1):
        whole = [stop for stop in stops if text[:end].endswith(stop)]
        if whole:
            longest = max(whole, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, stops: list[str]) -> str:
    return ended(text, stops)[0]


def could_begin(text: str, stops: list[str]) -> int:
    """The longest end of the text that a stop string begins with."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_text_in_pieces_is_cut_as_by_definition(pieces: list[str], stops: list[str]) -> None:
    found = finder(*stops)
    shown = "".join([*map(found.feed, pieces), found.end()])
    assert shown == cut("".join(pieces), stops)
    assert (found.found is not None) == any(stop in "".join(pieces) for stop in stops)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    found, fed, shown = finder(*stops), "", ""
    for piece in pieces:
        fed += piece
        shown += found.feed(piece)
        if found.found is not None:
            break
        assert shown == fed[: len(fed) - could_begin(fed, stops)]


@given(st.lists(st.tuples(LETTERS, st.booleans()), max_size=8), STOPS)
def test_hidden_pieces_are_searched_and_never_shown(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    found = finder(*stops)
    shown = "".join([*(found.feed(piece, visible) for piece, visible in pieces), found.end()])
    kept = len(cut("".join(piece for piece, _ in pieces), stops))
    visible = [visible for piece, visible in pieces for _ in piece][:kept]
    text = "".join(piece for piece, _ in pieces)[:kept]
    assert shown == "".join(char for char, is_visible in zip(text, visible) if is_visible)


def test_nothing_is_shown_after_a_stop() -> None:
    found = finder("END")
    assert [found.feed("a E"), found.feed("ND b"), found.feed("more"), found.end()] == ["a ", "", "", ""]


def test_an_almost_stop_comes_out_whole() -> None:
    found = finder("aab")
    assert [found.feed("a"), found.feed("a"), found.feed("a"), found.feed("c"), found.end()] == ["", "", "a", "aac", ""]


def test_what_is_held_comes_out_at_the_end() -> None:
    found = finder("stop")
    assert [found.feed("no sto"), found.end()] == ["no ", "sto"]


@given(st.lists(st.tuples(LETTERS, st.booleans()), max_size=8), STOPS)
def test_stop_counts_only_where_it_is_complete_in_a_piece_that_may_stop(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    found = finder(*stops)
    shown = "".join([*(found.feed(piece, may_stop=may) for piece, may in pieces), found.end()])
    text = "".join(piece for piece, _ in pieces)
    may_end = [may for piece, may in pieces for _ in piece]
    wholes = [(end, s) for end in range(1, len(text) + 1) for s in stops if may_end[end - 1] and text[:end].endswith(s)]
    first = min(wholes, key=lambda whole: (whole[0], -len(whole[1])), default=None)
    assert (shown, found.found) == ((text[: first[0] - len(first[1])], first[1]) if first else (text, None))


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_included_stop_is_the_end_of_the_text(pieces: list[str], stops: list[str]) -> None:
    found = StopFinder([StopPattern(stop) for stop in stops], include=True)
    shown = "".join([*map(found.feed, pieces), found.end()])
    text, stop = ended("".join(pieces), stops)
    assert shown == text + (stop or "")
