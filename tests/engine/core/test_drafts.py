"""Loading, swapping and remembering drafts while requests run."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine import engine as engine_module
from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import DraftInfo, EngineError, InvalidModel, UnknownDraft
from driftguard_engine.drafters import state_file
from driftguard_engine.drafters.loaded import NO_DRAFT
from driftguard_engine.engine import Engine
from driftguard_engine.models import directory as directories
from driftguard_engine.models.directory import version_of

from tests.engine.core.corpora import save_corpus
from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.heads import KINDS, save_random
from tests.engine.core.medusa_heads import save_random_heads
from tests.engine.core.tiny import drain, finished, request, save, serve, tokens


@pytest.fixture(scope="module")
def better(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The llama target itself as a draft: always accepted. Its version is given by its maker."""
    directory = save(tmp_path_factory.mktemp("drafts") / "better", "llama", seed=3)
    Path(directory, "driftguard_training.json").write_text(json.dumps({"version": "v2"}), encoding="utf-8")
    return directory


def test_a_loaded_draft_serves_only_after_the_swap(new_engine: Callable[..., Engine], better: str) -> None:
    engine = new_engine()
    first = engine.draft
    info = engine.load_draft(better)
    assert (info.version, info.method, info.directory) == ("v2", "draft_model", better)
    assert engine.draft == first
    assert engine.drafts == [first, info]
    before = serve(engine, request())["r"]
    assert engine.swap_draft("v2") == info == engine.draft
    after = serve(engine, request())["r"]
    assert (before.draft, after.draft) == (first, info)
    assert before.output_token_ids == after.output_token_ids
    assert after.counts.accepted == after.counts.drafted > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_running_requests_keep_their_draft_and_its_memory_is_freed_after_the_last(
    new_engine: Callable[..., Engine], better: str, ahead: bool
) -> None:
    expected = tokens(new_engine(), request("old", max_tokens=30, temperature=1.0, seed=4))["old"]
    engine = new_engine(ahead=ahead)
    first = engine.draft
    old_model = weakref.ref(engine._drafts._serving.drafter)
    engine.submit(request("old", max_tokens=30, temperature=1.0, seed=4))
    outputs = engine.step()
    engine.load_draft(better)
    engine.swap_draft("v2")
    engine.submit(request("new", max_tokens=3))
    while "new" not in finished(outputs):
        outputs += engine.step()
    assert first in engine.drafts
    done = finished(outputs + drain(engine))
    assert (done["old"].draft, done["new"].draft.version) == (first, "v2")
    assert done["old"].output_token_ids == expected
    assert [draft.version for draft in engine.drafts] == ["v2"]
    gc.collect()
    assert old_model() is None
    with pytest.raises(UnknownDraft, match=first.version):
        engine.swap_draft(first.version)


def replaced_under_a_request(engine: Engine, better: str) -> DraftInfo:
    """The draft before, which a running request keeps."""
    first = engine.draft
    engine.submit(request("r", max_tokens=30))
    engine.step()
    engine.load_draft(better)
    engine.swap_draft("v2")
    return first


def test_an_old_draft_can_be_put_back_before_it_is_gone(
    new_engine: Callable[..., Engine], better: str
) -> None:
    engine = new_engine()
    first = replaced_under_a_request(engine, better)
    engine.swap_draft(first.version)
    drain(engine)
    assert engine.draft == first
    assert engine.drafts == [first]


def test_an_old_draft_that_was_asked_for_again_outlives_its_last_request(
    new_engine: Callable[..., Engine], better: str
) -> None:
    engine = new_engine()
    first = replaced_under_a_request(engine, better)
    assert engine.load_draft(str(first.directory)) == first
    drain(engine)
    assert engine.swap_draft(first.version) == first == engine.draft
    assert [draft.version for draft in engine.drafts] == [first.version]


def test_an_old_draft_that_was_asked_for_again_stays_loaded_while_a_request_uses_it(
    new_engine: Callable[..., Engine], better: str, models: Path
) -> None:
    """However many others are loaded meanwhile: a second copy would come beside the one that is in use."""
    engine = new_engine()
    first = replaced_under_a_request(engine, better)
    in_use = engine._drafts._loaded[first.version]
    engine.load_draft(str(first.directory))
    for version in ("v3", "v4"):
        engine.load_draft(str(models / "llama"), version)
    assert engine.load_draft(str(first.directory)) == engine.swap_draft(first.version) == first
    assert engine._drafts.in_service is in_use
    drain(engine)
    assert engine.draft == first


def test_an_old_draft_stays_while_it_is_saved_as_the_one_in_service(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(state_dir=tmp_path)
    first = replaced_under_a_request(engine, better)

    def save_while_the_last_request_ends(*arguments: Any) -> None:
        state_file.save_draft(*arguments)
        drain(engine)

    monkeypatch.setattr(engine_module, "save_draft", save_while_the_last_request_ends)
    assert engine.swap_draft(first.version) == first == engine.draft


def test_one_version_is_one_directory(new_engine: Callable[..., Engine], better: str, models: Path) -> None:
    engine = new_engine()
    assert engine.load_draft(better) == engine.load_draft(better)
    with pytest.raises(InvalidModel, match=r"version: 'v2' is already loaded from .*better"):
        engine.load_draft(str(models / "llama_draft"), version="v2")
    with pytest.raises(UnknownDraft, match="v9"):
        engine.swap_draft("v9")


def test_speculation_is_switched_off_per_request_and_for_all(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    done = serve(engine, request("off", num_speculative_tokens=0), request("on"))
    engine.set_speculation(False)
    done |= serve(engine, request("all_off"))
    engine.set_speculation(True)
    done |= serve(engine, request("on_again"))
    for name in ("off", "all_off"):
        assert (done[name].draft, done[name].num_speculative_tokens) == (NO_DRAFT, 0)
        assert (done[name].counts.drafted, done[name].counts.steps) == (0, 12)
    for name in ("on", "on_again"):
        assert (done[name].draft, done[name].num_speculative_tokens) == (engine.draft, 4)
        assert done[name].counts.drafted > 0


def test_an_ngram_engine_takes_a_draft_model_and_goes_back(
    new_engine: Callable[..., Engine], better: str
) -> None:
    engine = new_engine(drafter="ngram", draft=None)
    ngram = engine.draft
    assert (ngram.name, ngram.method, ngram.directory) == ("ngram", "ngram", None)
    engine.load_draft(better)
    engine.swap_draft("v2")
    assert serve(engine, request())["r"].draft.version == "v2"
    engine.swap_draft(ngram.version)
    assert serve(engine, request())["r"].draft == ngram


@pytest.mark.parametrize(("drafter", "version"), [("suffix", "no-corpus"), ("ngram", "ngram-2-4")])
def test_a_corpus_is_replaced_under_traffic_and_serves_after_a_restart(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, drafter: str, version: str
) -> None:
    answer = tokens(new_engine(), request("r", max_tokens=40))["r"]
    corpus = save_corpus(tmp_path / "corpus", str(models / "llama"), [answer])
    engine = new_engine(drafter=drafter, draft=None, state_dir=tmp_path / "state")
    first = engine.draft
    assert (first.name, first.version, first.method, first.directory) == (drafter, version, drafter, None)
    engine.submit(request("old", max_tokens=40))
    outputs = engine.step()
    info = engine.load_draft(corpus)
    assert (info.name, info.method, info.directory) == ("corpus", drafter, corpus)
    engine.swap_draft(info.version)
    engine.submit(request("new", max_tokens=40))
    done = finished(outputs + drain(engine))
    assert (done["old"].draft, done["new"].draft) == (first, info)
    assert done["old"].output_token_ids == done["new"].output_token_ids == answer
    assert done["new"].counts.accepted > 25 > done["old"].counts.accepted
    restarted = new_engine(drafter=drafter, draft=None, state_dir=tmp_path / "state")
    assert restarted.draft == info
    restarted.swap_draft(version)
    assert serve(restarted, request())["r"].draft == first


@pytest.mark.parametrize("ahead", [False, True])
def test_both_parts_of_a_hybrid_are_replaced_under_traffic_and_serve_after_a_restart(
    new_engine: Callable[..., Engine], models: Path, better: str, tmp_path: Path, ahead: bool
) -> None:
    answer = tokens(new_engine(), request("r", max_tokens=40))["r"]
    corpus = save_corpus(tmp_path / "corpus", str(models / "llama"), [answer])
    engine = new_engine(drafter="hybrid", ahead=ahead, state_dir=tmp_path / "state")
    first, outputs = engine.draft, list[Any]()
    assert (first.name, first.method, first.corpus) == ("llama_draft", "hybrid", None)
    model = engine._drafts.drafter.model  # type: ignore[union-attr]

    engine.submit(request("old", max_tokens=40))
    outputs += engine.step()
    with_corpus = engine.load_draft(corpus)
    assert (with_corpus.name, with_corpus.directory, with_corpus.corpus) == (
        "llama_draft",
        first.directory,
        corpus,
    )
    assert with_corpus.version.startswith(f"{first.version}+")
    engine.swap_draft(with_corpus.version)
    assert engine._drafts.drafter.model is model  # type: ignore[union-attr]
    engine.submit(request("corpus", max_tokens=40))
    outputs += engine.step()

    with_both = engine.load_draft(better)
    assert (with_both.name, with_both.directory, with_both.corpus) == ("better", better, corpus)
    engine.swap_draft(with_both.version)
    engine.submit(request("both", max_tokens=40))
    done = finished(outputs + drain(engine))
    assert [done[name].draft for name in ("old", "corpus", "both")] == [first, with_corpus, with_both]
    assert {each.output_token_ids for each in done.values()} == {answer}
    assert done["corpus"].counts.accepted > done["old"].counts.accepted
    assert done["both"].counts.accepted == done["both"].counts.drafted

    restarted = new_engine(drafter="hybrid", state_dir=tmp_path / "state")
    assert restarted.draft == with_both
    assert serve(restarted, request("both", max_tokens=40))["both"].counts == done["both"].counts


@pytest.mark.parametrize("part", ["model", "corpus"])
def test_a_hybrid_whose_model_was_replaced_in_its_directory_serves_the_one_that_its_version_names(
    new_engine: Callable[..., Engine], models: Path, better: str, tmp_path: Path, part: str
) -> None:
    """Also where only a corpus is asked for. The new model is the target itself: all its drafts are right."""
    draft = shutil.copytree(models / "llama_draft", tmp_path / "draft")
    engine = new_engine(drafter="hybrid", draft=str(draft), suffix_min_match=20)
    before = serve(engine, request("r", range(30), 30))["r"]
    assert before.counts.accepted < before.counts.drafted
    shutil.copy(Path(better, "model.safetensors"), tmp_path / "new")
    (tmp_path / "new").replace(draft / "model.safetensors")
    corpus = save_corpus(tmp_path / "corpus", str(models / "llama"), [(1, 2)])
    info = engine.load_draft(str(draft) if part == "model" else corpus)
    assert info.version.split("+")[0] == version_of(draft) != engine.draft.version
    engine.swap_draft(info.version)
    after = serve(engine, request("r", range(30), 30))["r"]
    assert (after.draft, after.reused_prompt_tokens) == (info, 0)
    assert after.counts.accepted == after.counts.drafted > 0


@pytest.mark.parametrize("version", [None, "given"])
def test_the_weights_of_a_hybrid_are_read_once_to_tell_its_version(
    new_engine: Callable[..., Engine],
    models: Path,
    better: str,
    tmp_path: Path,
    version: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are gigabytes; of a model or head from elsewhere no file tells it."""
    read: Counter[str] = Counter()

    def counting(directory: Path) -> str:
        read[directory.name] += 1
        return version_of(directory)

    monkeypatch.setattr(directories, "version_of", counting)
    draft = shutil.copytree(models / "llama_draft", tmp_path / "draft")
    engine = new_engine(drafter="hybrid", draft=str(draft))
    assert read == {"draft": 1}
    save_corpus(tmp_path / "corpus", str(models / "llama"), [(1, 2)])
    shutil.copytree(better, tmp_path / "other")
    for name in ("corpus", "other"):
        read.clear()
        engine.load_draft(str(tmp_path / name), version and f"{version} {name}")
        assert set(read.values()) == {1}


@pytest.mark.parametrize("part", ["corpus", "model"])
def test_a_prefix_that_the_model_of_a_hybrid_has_read_is_reused_with_another_corpus(
    new_engine: Callable[..., Engine], models: Path, better: str, tmp_path: Path, part: str
) -> None:
    """And another model has not read it. A prompt in between has taken the place of another one."""
    engine = new_engine(drafter="hybrid", max_batch=1)
    prompts = {"first": range(60), "other": range(100, 160)}
    serve(engine, request("first", prompts["first"]))
    new = better if part == "model" else save_corpus(tmp_path / "c", str(models / "llama"), [(1, 2)])
    info, old = engine.load_draft(new), engine.draft
    engine.swap_draft(info.version)
    done = serve(engine, request("first", prompts["first"], 20))["first"]
    assert done.reused_prompt_tokens == (56 if part == "corpus" else 0)
    serve(engine, request("other", prompts["other"]))
    engine.load_draft(str(old.directory if part == "model" else new), "again")
    engine.swap_draft("again")
    assert serve(engine, request("first", prompts["first"]))["first"].reused_prompt_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_head_is_put_into_service_under_traffic_and_serves_after_a_restart(
    new_engine: Callable[..., Engine],
    head_of: Callable[[str], str],
    models: Path,
    tmp_path: Path,
    ahead: bool,
) -> None:
    """In place of a draft model, in place of other heads that read other layers, and back."""
    target = load_target(models / "llama")
    other = save_random_head(tmp_path / "other", target, range(257), (1,))
    others = [other, *(save_random(tmp_path / kind, kind, target) for kind in KINDS)]
    answer = tokens(new_engine(), request("r", max_tokens=40))["r"]
    engine = new_engine(ahead=ahead, state_dir=tmp_path / "state", max_batch=9)
    first, outputs = engine.draft, list[Any]()
    infos = [first, *(engine.load_draft(directory) for directory in (head_of("llama"), *others))]
    assert [info.method for info in infos] == ["draft_model", "eagle3", "eagle3", *KINDS]
    served = [*infos[1:], first, infos[1]]
    for turn, info in enumerate(served):
        engine.load_draft(str(info.directory), info.version)  # it may have left with its last request
        engine.swap_draft(info.version)
        engine.submit(request(f"{turn}", max_tokens=40))
        outputs += engine.step()
        outputs += engine.step()
    done = finished(outputs + drain(engine))
    assert [done[f"{turn}"].draft for turn in range(len(served))] == served
    assert {each.output_token_ids for each in done.values()} == {answer}
    last, alone = done[f"{len(served) - 1}"], serve(engine, request("alone", max_tokens=40))["alone"]
    assert last.counts == done["0"].counts == alone.counts
    assert done["0"].counts.accepted > 0
    assert new_engine(state_dir=tmp_path / "state").draft == infos[1]


def test_the_drafter_and_its_draft_are_of_one_kind(
    new_engine: Callable[..., Engine], models: Path, head_of: Callable[[str], str], tmp_path: Path
) -> None:
    corpus = save_corpus(tmp_path / "corpus", str(models / "llama"), [(1, 2)])
    with pytest.raises(InvalidModel, match="is a corpus, for --drafter suffix; --drafter draft_model"):
        new_engine(draft=corpus)
    for drafter in ("suffix", "ngram"):
        told = f"is a draft model, for --drafter draft_model; --drafter {drafter} takes a corpus"
        with pytest.raises(InvalidModel, match=told):
            new_engine(drafter=drafter, draft=str(models / "llama_draft"))
    with pytest.raises(InvalidModel, match="is a corpus; --drafter hybrid takes a draft model or a head"):
        new_engine(drafter="hybrid", draft=corpus)
    with pytest.raises(InvalidModel, match=r"corpus: the corpus in .* cannot be read"):
        new_engine(drafter="hybrid", corpus=str(models / "llama"))
    with pytest.raises(InvalidModel, match="is an EAGLE-3 head, for --drafter eagle3; --drafter draft_model"):
        new_engine(draft=head_of("llama"))
    with pytest.raises(InvalidModel, match="is a draft model, for --drafter draft_model; --drafter eagle3"):
        new_engine(drafter="eagle3", draft=str(models / "llama_draft"))


def test_the_promoted_draft_serves_after_a_restart(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path
) -> None:
    engine = new_engine(state_dir=tmp_path / "state")
    engine.load_draft(better, version="promoted")
    assert new_engine(state_dir=tmp_path / "state").draft == engine.draft
    promoted = engine.swap_draft("promoted")
    assert new_engine(state_dir=tmp_path / "state").draft == promoted
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["draft_in_service.json"]


def test_whether_somebody_put_its_draft_into_service_is_known_over_restarts_too(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path
) -> None:
    engine = new_engine(state_dir=tmp_path / "state")
    first = engine.draft
    assert not engine.activated
    engine.load_draft(better, version="promoted")
    engine.swap_draft("promoted")
    assert engine.activated
    assert new_engine(state_dir=tmp_path / "state").activated
    engine.load_draft(str(first.directory), first.version)
    engine.swap_draft(first.version)  # as a rollback does
    assert new_engine(state_dir=tmp_path / "state").activated
    for lost in ({}, {"state_dir": tmp_path / "another"}):
        assert not new_engine(**lost).activated


def test_a_draft_that_a_restart_would_lose_is_told(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({"state_dir": tmp_path / "state"}, {}):
        engine = new_engine(**options)
        engine.load_draft(better, version="promoted")
        first = engine.draft
        engine.swap_draft("promoted")
        engine.load_draft(str(first.directory), first.version)
        engine.swap_draft(first.version)
    assert caplog.messages == ["draft promoted serves until this engine ends: --state-dir would keep it"]


def test_a_state_directory_that_cannot_be_written_to_is_named(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.touch()
    with pytest.raises(InvalidConfig, match=rf"^state_dir: {state} cannot be written to"):
        new_engine(state_dir=state)
    state.unlink()
    engine = new_engine(state_dir=state)
    configured = engine.draft
    engine.load_draft(better)
    state.rmdir()
    state.touch()
    with pytest.raises(EngineError, match=rf"draft v2 is not in service: {state} cannot be written to"):
        engine.swap_draft("v2")
    assert engine.draft == configured


def test_of_drafts_that_were_never_in_service_the_two_newest_stay(
    new_engine: Callable[..., Engine], better: str
) -> None:
    engine = new_engine()
    configured = engine.draft
    for version in ("v2", "v3", "v4"):
        engine.load_draft(better, version)
    assert [draft.version for draft in engine.drafts] == [configured.version, "v3", "v4"]


def test_a_promoted_draft_that_is_gone_is_missed_loudly(
    new_engine: Callable[..., Engine], better: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(better, tmp_path / "copy")
    engine = new_engine(state_dir=tmp_path)
    configured = engine.draft
    engine.load_draft(str(copy))
    engine.swap_draft("v2")
    shutil.rmtree(copy)
    with caplog.at_level(logging.ERROR):
        assert new_engine(state_dir=tmp_path).draft == configured
    assert "draft v2 was in service before and cannot be loaded" in caplog.text
    assert str(copy) in caplog.text


@pytest.mark.parametrize("by_an_earlier_engine", [False, True])
def test_other_weights_in_the_directory_of_the_remembered_draft_do_not_serve_by_its_version(
    models: Path, better: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, by_an_earlier_engine: bool
) -> None:
    """The draft was rolled back to, so that the state directory has it; then its files were replaced."""
    own = shutil.copytree(models / "llama_draft", tmp_path / "own")

    def start() -> Engine:
        config = EngineConfig(str(models / "llama"), str(own), state_dir=tmp_path / "state", max_batch=2)
        return Engine(config)

    engine = start()
    first = engine.draft.version
    engine.swap_draft(engine.load_draft(better).version)
    engine.swap_draft(engine.load_draft(str(own), first).version)
    state = tmp_path / "state" / "draft_in_service.json"
    if by_an_earlier_engine:  # which did not tell of the files
        told = json.loads(state.read_text(encoding="utf-8"))
        del told["own_version"]
        state.write_text(json.dumps(told), encoding="utf-8")
    os.utime(state, (time.time() - 60,) * 2)
    (own / "model.safetensors").touch()  # written again, and the same
    again = start()
    assert (again.draft.version, again.activated) == (first, True)
    shutil.copyfile(Path(better) / "model.safetensors", own / "model.safetensors")
    with caplog.at_level(logging.ERROR):
        replaced = start()
    assert (replaced.draft.version, replaced.activated) == (version_of(own), False)
    assert replaced.draft.version != first
    assert f"{own} was changed since" in caplog.text


def test_other_weights_than_a_version_had_before_are_not_loaded_by_it_again(
    models: Path, better: str, tmp_path: Path
) -> None:
    """As by a rollback to the first draft, whose files were replaced meanwhile, for the next restart."""
    own = shutil.copytree(models / "llama_draft", tmp_path / "own")
    engine = Engine(EngineConfig(str(models / "llama"), str(own), max_batch=2))
    first = engine.draft
    engine.swap_draft(engine.load_draft(better).version)
    assert engine.load_draft(str(own), first.version) == first
    engine.swap_draft(first.version)
    engine.swap_draft(engine.load_draft(better).version)
    shutil.copyfile(Path(better) / "model.safetensors", own / "model.safetensors")
    with pytest.raises(InvalidModel, match=f"{own}.* other files.* {first.version}"):
        engine.load_draft(str(own), first.version)
    replaced = engine.load_draft(str(own))
    assert replaced.version == version_of(own) != first.version


def test_a_link_that_leads_to_older_files_now_does_not_make_them_serve_by_the_version_of_the_former_ones(
    models: Path, better: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No file is newer than what was saved: also where a copy keeps times, as of `rsync -a`."""
    current, other = tmp_path / "current", Path(better)
    current.symlink_to(models / "llama_draft")

    def start() -> Engine:
        config = EngineConfig(str(models / "llama"), str(current), state_dir=tmp_path / "state", max_batch=2)
        return Engine(config)

    engine = start()
    first = engine.draft.version
    engine.swap_draft(engine.load_draft(better, "by hand").version)
    again = start()
    assert again.draft.version == "by hand"
    again.swap_draft(again.load_draft(str(current), first).version)
    assert (start().draft.version, start().activated) == (first, True)
    current.unlink()
    current.symlink_to(other)
    with caplog.at_level(logging.ERROR):
        replaced = start()
    assert (replaced.draft.version, replaced.activated) == (version_of(other), False)
    assert replaced.draft.version != first
    assert f"{current} was changed since" in caplog.text


def test_a_corpus_of_a_hybrid_serves_by_its_given_version_also_where_its_files_are_newer_than_what_was_saved(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path
) -> None:
    """As after they were restored from a backup. A retraining gives it the version of the corpus alone."""
    corpus = save_corpus(tmp_path / "corpus", str(models / "llama"), [(1, 2)])
    engine = new_engine(drafter="hybrid", state_dir=tmp_path / "state")
    promoted = engine.swap_draft(engine.load_draft(corpus, version_of(Path(corpus))).version)
    os.utime(tmp_path / "state" / "draft_in_service.json", (time.time() - 60,) * 2)
    for path in Path(corpus).iterdir():
        path.touch()
    restarted = new_engine(drafter="hybrid", state_dir=tmp_path / "state")
    assert (restarted.draft, restarted.activated) == (promoted, True)


def test_a_draft_configured_anew_wins_over_the_remembered_one(
    models: Path, better: str, tmp_path: Path
) -> None:
    def start(draft: str) -> Engine:
        return Engine(EngineConfig(target=str(models / "llama"), draft=draft, state_dir=tmp_path))

    engine = start(str(models / "llama_draft"))
    engine.load_draft(better)
    engine.swap_draft("v2")
    assert start(str(models / "llama")).draft.name == "llama"
    assert start(str(models / "llama_draft")).draft.version == "v2"


def test_an_unreadable_state_file_does_not_stop_the_engine(
    new_engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "draft_in_service.json").write_text("{half", encoding="utf-8")
    assert new_engine(state_dir=tmp_path).draft.name == "llama_draft"
    assert "cannot be read" in caplog.text


def test_a_draft_with_another_shape_of_vocabulary_and_context_still_drafts(
    new_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = new_engine()
    expected = tokens(engine, request("r", max_tokens=60))["r"]
    shapes: dict[str, dict[str, Any]] = {
        "wide": {"vocab_size": 300},
        "short": {"max_position_embeddings": 32},
    }
    for version, changes in shapes.items():
        engine.load_draft(save(tmp_path / version, "llama", seed=3, **changes), version)
        engine.swap_draft(version)
        done = serve(engine, request("r", max_tokens=60))["r"]
        assert done.output_token_ids == expected
        assert done.counts.drafted > 0


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("llama", "draft_model"), ("gpt2", "draft_model"), ("llama", "eagle3"), ("llama", "medusa")],
)
def test_what_is_written_into_the_files_of_served_models_changes_nothing_before_a_restart(
    new_engine: Callable[..., Engine],
    head_of: Callable[[str], str],
    models: Path,
    tmp_path: Path,
    kind: str,
    drafter: str,
) -> None:
    """As by a copy of the next model over them. In the type of the files their pages could be the weights."""
    source = str(models / f"{kind}_draft")
    if drafter == "eagle3":
        source = head_of(kind)
    elif drafter == "medusa":
        source = save_random_heads(tmp_path / "heads", 32, 257)
    copies = [
        Path(shutil.copytree(each, tmp_path / f"{number}"))
        for number, each in enumerate((str(models / kind), source))
    ]
    target, draft = map(str, copies)
    engine = new_engine(kind, target=target, drafter=drafter, draft=draft, prefix_reuse=False)
    before = serve(engine, request("r", range(9), 30))["r"]
    for path in (path for copy in copies for path in copy.glob("*.safetensors")):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    after = serve(engine, request("r", range(9), 30))["r"]
    assert (after.output_token_ids, after.counts) == (before.output_token_ids, before.counts)
    assert after.counts.drafted > 0
