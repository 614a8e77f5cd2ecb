"""The prose check of `make lint` finds each kind of fault."""

import prose


def test_each_kind_of_fault_is_found():
    plain = "Return the accepted length of each row, int64 [B]. The engine copies the result to the host. " * 4
    assert prose.complaints([(plain, True)], ".py") == []
    assert "odd phrase" in prose.complaints([(f"{plain} The caller is told.", True)], ".py")[0]
    assert "begins with" in prose.complaints([(f"What a row has. {plain}", True)], ".py")[0]
    heavy = f"{plain} The length that they had, and those that it has."
    assert [fault.split(" ", 1)[1][:8] for fault in prose.complaints([(heavy, False)], ".md")] == [
        "clause w",
        "pronouns",
    ]


def test_comments_cells_and_documents_are_read(tmp_path):
    (tmp_path / "a.py").write_text('"""Doc."""\nx = 1  # comment\n')
    (tmp_path / "b.ipynb").write_text('{"cells": [{"cell_type": "markdown", "source": ["Text `code`"]}]}')
    (tmp_path / "c.md").write_text("Text\n```\ncode\n```\n| cell |\n")
    found = [" ".join(text for text, _ in prose.texts(path)).split() for path in sorted(tmp_path.iterdir())]
    assert found == [["Doc.", "comment"], ["Text"], ["Text"]]
