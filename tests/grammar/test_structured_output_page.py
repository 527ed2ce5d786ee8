"""The page about structured output says what the tests have tried."""

from __future__ import annotations

from structured_output_page import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run `python tests/grammar/structured_output_page.py` and commit what it changed"


def test_the_page_lists_refusals_with_their_reason():
    assert "| not | " in page()
    assert "400: #/not: the keyword not cannot be enforced; say what is allowed instead" in page()
