import pytest

from app.stop_strings import StopStrings


def run(strings: list[str], parts: list[str]) -> tuple[str, bool]:
    """The text that came out, and whether it was stopped."""
    stops = StopStrings(strings)
    text = ""
    for part in parts:
        passed, stopped = stops.push(part)
        text += passed
        if stopped:
            return text, True
    return text + stops.flush(), False


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize(
    ("strings", "text", "kept"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["END"], "EENEND", "EEN"),
        (["aab"], "aaab", "a"),
        (["\n\n", "."], "a\nb\n\nc.", "a\nb"),
        ([".", "\n\n"], "a.b\n\n", "a"),
        (["日本"], "x日日本y", "x日"),
        (["x"], "x", ""),
        ([], "all of it", "all of it"),
    ],
)
def test_text_ends_where_the_first_stop_string_begins(
    strings: list[str], text: str, kept: str, width: int
) -> None:
    parts = [text[i : i + width] for i in range(0, len(text), width)]
    assert run(strings, parts) == (kept, kept != text)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["<stop>"])
    assert stops.push("abc<st") == ("abc", False)
    assert stops.push("range") == ("<strange", False)
    assert stops.push("<stop") == ("", False)
    assert stops.push(">tail") == ("", True)


def test_a_stop_string_that_ended_unarmed_is_text() -> None:
    stop = StopStrings(["b", "abc"])
    assert stop.push("xab", armed=False) == ("x", False)
    assert stop.push("y") == ("aby", False)
    assert stop.push("zb") == ("z", True)


def test_a_stop_string_may_begin_unarmed() -> None:
    stop = StopStrings(["xyz"])
    assert stop.push("a xyz xy", armed=False) == ("a xyz ", False)
    assert stop.push("z") == ("", True)
