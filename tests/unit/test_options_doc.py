from scripts.options_doc import PAGE, page


def test_the_page_of_options_is_what_the_declarations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.options_doc"
