"""What the site makes of the documents before mkdocs sees them; `make site` refuses a broken link."""

from __future__ import annotations

from docs.site_markdown import four_spaces, navigation


def test_sections_and_pages_are_those_of_the_index() -> None:
    index = """\
## A

| | |
| --- | --- |
| [One](one.md) | see [two](two.md) |

## B

### C

| [Three](../x/three.md) | |

## D
"""
    assert navigation(index) == [
        {"A": [{"One": "docs/one.md"}]},
        {"B": [{"C": [{"Three": "x/three.md"}]}]},
        {"D": []},
    ]


def test_what_is_in_a_list_stays_in_it() -> None:
    """Python's Markdown ends a list at a line that is indented by less than four spaces."""
    given = """\
Before:
1. First
   goes on

   ```sh
   command \\
     --option
   ```
2. Second:
   - inner
     goes on
10. Third

After
"""
    assert (
        four_spaces(given)
        == """\
Before:

1.  First
    goes on

    ```sh
    command \\
      --option
    ```

2.  Second:

    -   inner
        goes on

10. Third

After"""
    )


def test_nothing_else_changes() -> None:
    text = "# A - b\n\n```\n- no list\n  - here\n```\n\n| a |\n| - |\n| 1. |\n"
    assert four_spaces(text) == text.rstrip()
