"""The comparison with accepted outputs is red where it should be, and where it would be silent."""

import json

SECOND = """```{code-cell} ipython3
:tags: [nbval-check-output]

print(len(values))
```

```{code-cell} ipython3
:tags: [nbval-check-output]
"""
FIRST = "```{code-cell} ipython3\n:tags: [nbval-check-output]\n"


def reference(book):
    return json.loads((book.root / "tests/reference/tiny.json").read_text())


def write_reference(book, data):
    (book.root / "tests/reference/tiny.json").write_text(json.dumps(data))


def test_accepted_outputs_agree_and_are_remembered(built):
    assert "compared already" in built("check")


def test_reference_holds_the_marked_cells_only(ran):
    cells = reference(ran)["cells"]
    assert len(cells) == 1 and "ledger.verdicts()" in cells[0]["code"]
    assert "tiny.T1" in cells[0]["outputs"][0]["text"]


def test_no_reference(fresh):
    assert "has no accepted outputs" in fresh("check", code=1)


def test_reference_that_was_never_executed(copy):
    data = reference(copy)
    data["cells"][0] |= {"outputs": [], "executed": False}
    write_reference(copy, data)
    assert "its reference was never executed" in copy("check", code=1)


def test_marked_cell_without_accepted_output(copy):
    copy.edit(FIRST, SECOND)
    said = copy("check", code=1)
    assert "marked cell 1 has no accepted output" in said and "mhabook accept tiny" in said


def test_marked_cell_whose_code_changed(copy):
    copy.edit("ledger.verdicts()", "ledger.verdicts()  # again")
    assert "has no accepted output" in copy("check", code=1)


def test_chapter_without_a_marked_cell(copy):
    copy.edit(":tags: [nbval-check-output]", ":tags: []")
    assert "no cell tagged 'nbval-check-output'" in copy("check", code=1)


def test_one_per_cent_is_seen(copy):
    copy.edit("np.arange(FIRST, FIRST + size) ** 2", "np.arange(FIRST, FIRST + size) ** 2 * 1.01",
              "mhabook_lib/tiny.py")
    said = copy("check", code=1)
    assert "differs from what was accepted" in said and "not as accepted: tiny" in said


def test_one_per_cent_in_a_printed_number_is_seen(copy):
    """Same verdicts, another number."""
    copy.edit("def squares(size):", "def squares(size, FIRST=FIRST):", "mhabook_lib/tiny.py")
    data = reference(copy)
    text = data["cells"][0]["outputs"][0]["text"]
    assert text.startswith("15 3.57143")
    data["cells"][0]["outputs"][0]["text"] = text.replace("3.57143", "3.60714", 1)
    write_reference(copy, data)
    assert "3.60714" in copy("check", code=1)


def test_rounding_noise_is_not_seen(copy):
    """1e-12 relative changes the last bits of the printed numbers, not what is printed."""
    copy.edit("from mhabook_lib.tiny import squares",
              "import mhabook_lib.tiny\n\nsquares = mhabook_lib.tiny.squares")
    copy.edit("stable(np.sqrt(values.astype(float)).sum(), 10), stable(values[-1] / 7)",
              "stable(np.sqrt(noisy).sum(), 10), stable(noisy[-1] / 7)")
    copy.edit("print(stable", "noisy = values.astype(float) * mhabook_lib.tiny.NOISE\nprint(stable")
    library = copy.root / "mhabook_lib/tiny.py"
    library.write_text(library.read_text() + "\nNOISE = 1.0\n")
    copy("run")
    copy("accept")
    copy.edit("NOISE = 1.0", "NOISE = 1.0 + 1e-12", "mhabook_lib/tiny.py")
    assert "1 marked cells as accepted" in copy("check")
    copy.edit("NOISE = 1.0 + 1e-12", "NOISE = 1.01", "mhabook_lib/tiny.py")
    copy("check", code=1)


def test_nothing_is_accepted_from_an_old_run(copy):
    copy.edit("FIRST = 1", "FIRST = 2", "mhabook_lib/tiny_base.py")
    assert "changed since its run" in copy("accept", code=1)
