from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from driftguard_training import corpus


@pytest.mark.slow
@pytest.mark.parametrize("domain", corpus.domains())
def test_training_never_sees_a_heldout_document(domain: str) -> None:
    train, heldout = corpus.documents(domain, "train"), corpus.documents(domain, "heldout")
    assert len(heldout) >= 10
    assert not set(train) & set(heldout)
    assert len(set(train)) == len(train)
    assert sum(map(len, train)) > 4 * sum(map(len, heldout))


@pytest.mark.parametrize("domain", corpus.domains())
def test_prompts_are_whole_lines_of_heldout_documents(domain: str) -> None:
    prompts = corpus.prompts(domain, 40, seed=7, characters=400)
    heldout = corpus.documents(domain, "heldout")
    for prompt in prompts:
        assert 0 < len(prompt) <= 400
        assert any("\n" + prompt in document for document in heldout)


def test_prompts_depend_on_the_seed_alone() -> None:
    code = "from driftguard_training import corpus; print(corpus.prompts('python', 5, seed=3))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, check=True, capture_output=True
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert printed == {f"{corpus.prompts('python', 5, seed=3)}\n".encode()}
    assert corpus.prompts("python", 5, seed=3) != corpus.prompts("python", 5, seed=4)


def test_python_is_code_and_prose_is_not() -> None:
    parsed = 0
    for text in corpus.documents("python", "heldout"):
        try:
            parsed += bool(ast.parse(text).body)
        except SyntaxError:  # cut at the size limit, or Python 2 kept for lib2to3
            continue
    assert parsed > 0.8 * len(corpus.documents("python", "heldout"))
    prose = "".join(corpus.documents("prose", "heldout"))
    assert prose.count(" the ") > 20 * prose.count("\ndef ")


def test_corpus_does_not_import_torch() -> None:
    code = (
        "import sys; from driftguard_training import corpus; corpus.prompts('headers', 1, seed=0); "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'numpy')])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


def test_a_domain_without_text_is_an_error_that_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(corpus, "_header_roots", lambda: [("python/", tmp_path)])
    corpus._domain.cache_clear()
    with pytest.raises(corpus.NoTextError) as error:
        corpus.documents("headers", "train")
    corpus._domain.cache_clear()
    assert str(error.value) == (f"Domain 'headers' has no train text on this machine: looked in {tmp_path}.")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="domain must be one of python, prose, headers, not 'german'"):
        corpus.documents("german", "train")
    with pytest.raises(ValueError, match="split must be train or heldout, not 'test'"):
        corpus.documents("python", "test")  # type: ignore[arg-type]
