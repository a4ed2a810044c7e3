from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuclip.errors import RunFailed, UserError
from neuclip.formatting import percent
from neuclip.records import RunFolder, read_lines, write_json
from neuclip.report.page import write_report
from tests.report.sample_run import HELD_OUT, SETTINGS, make_fine_tuned, write_lines

VOID = {"meta", "img", "br", "link", "input", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Structure(HTMLParser):
    """Remembers which tags were opened and fails on a closing tag that closes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing, line {self.getpos()[0]}"


def structure(page: str) -> Structure:
    parser = Structure()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def report(folder: RunFolder) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def visible_text(page: str) -> str:
    """What a reader sees, in one line."""
    without_code = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_code)))


def change_summary(folder: RunFolder, **changes: Any) -> None:
    write_json(folder.summary, json.loads(folder.summary.read_text()) | changes)


def test_the_page_is_in_the_run_folder_and_below_a_megabyte(run: RunFolder) -> None:
    assert write_report(run) == run.path / "report.html"
    assert run.report.stat().st_size < 1_000_000
    assert run.report.read_text(encoding="utf-8").count('class="query"') == 24


def test_every_tag_is_closed_where_it_was_opened(run: RunFolder) -> None:
    tags = [tag for tag, _ in structure(report(run)).seen]
    assert tags.count("h1") == 1 and tags.count("main") == 1


def test_every_section_of_the_settings_has_a_table(run: RunFolder) -> None:
    page = report(run)
    assert all(f"<caption>{name}</caption>" in page for name in SETTINGS)


def test_nothing_in_the_page_refers_to_anything_outside_it(run: RunFolder) -> None:
    page = report(run)
    for tag, attributes in structure(page).seen:
        assert tag not in ("link", "iframe", "object", "base", "a")
        assert "href" not in attributes
        assert tag != "script" or "src" not in attributes
        assert (attributes.get("src") or "data:image/png;base64,").startswith("data:image/")
    assert "http://" not in page and "https://" not in page
    assert "@import" not in page and "url(" not in page


def test_the_policy_lets_the_browser_load_nothing_and_run_only_the_pages_own_script(run: RunFolder) -> None:
    policy = next(a["content"] for tag, a in structure(report(run)).seen if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "script-src 'sha256-" in policy


def test_a_hostile_text_is_shown_and_not_run_wherever_it_comes_from(run: RunFolder) -> None:
    gallery = json.loads(run.gallery.read_text())
    gallery["dataset"] = HOSTILE
    gallery["image_to_text"][0]["caption"] = HOSTILE
    gallery["image_to_text"][0]["matches"][0]["caption"] = HOSTILE
    gallery["text_to_image"][0]["matches"][0]["caption"] = HOSTILE
    gallery["text_to_image"][1]["matches"][0]["image"] = 'data:image/png;base64,AA" onerror="alert(3)'
    write_json(run.gallery, gallery)
    texts: dict[str, Any] = {"run": {"name": HOSTILE}, "model": {"name": HOSTILE}, "data": {"train": HOSTILE}}
    run.settings.write_text(yaml.safe_dump(SETTINGS | texts))
    figures = {f"{HOSTILE}.image_to_text_recall_at_1": 0.5, f"{HOSTILE}.top1": 0.5, f"{HOSTILE}2.top1": 0.5}
    write_lines(run.evaluation, [{"samples": samples} | figures for samples in (100, 200)])
    change_summary(run, evaluation=figures, not_measured={HOSTILE: HOSTILE})
    write_lines(run.skipped, [{"id": 3, "reason": HOSTILE}, {"id": 3, "reason": HOSTILE, "held_out": HOSTILE}])
    write_json(run.environment, {HOSTILE: HOSTILE, "device": HOSTILE})
    page = report(run)
    seen = structure(page).seen
    assert [tag for tag, _ in seen].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in seen for name in attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "could not be read" not in page  # the settings are among what is shown
    assert f" name {HOSTILE} pretrained " in visible_text(page)


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize("settings", [f"run: {{{json.dumps(HOSTILE)}: 1}}", BOMB, "objective: future", "[" * 5000])
def test_settings_that_no_run_can_have_are_called_unreadable_and_the_rest_is_shown(
    run: RunFolder, settings: str
) -> None:
    run.settings.write_text(settings)
    page = report(run)
    assert "settings.yaml could not be read" in page and "alert(1)" not in page
    assert "recall@10" in visible_text(page) and structure(page).seen


def test_an_image_from_elsewhere_is_not_fetched(run: RunFolder) -> None:
    gallery = json.loads(run.gallery.read_text())
    gallery["image_to_text"][0]["image"] = "https://example.org/spy.png"
    write_json(run.gallery, gallery)
    page = report(run)
    assert "example.org" not in page
    assert "no image" in page


def test_headlines_say_what_was_reached_against_chance_and_at_what_cost(run: RunFolder) -> None:
    text = visible_text(report(run))
    assert "Image to text icons-30k/new-drawings, 1,143 images, 960 captions recall@1 39.9 % 383x chance" in text
    assert "recall@5 64.7 % 124x chance" in text
    assert "recall@10 79.6 % 76x chance median rank 34 of 960 captions" in text
    assert "Zero-shot, top-1 59.9 % 5.4x chance, largest class 22.2 % icons-30k/zero-shot/groups, 9 classes" in text
    assert "Normalizer error 0.12 16x smaller than a mini-batch's squared error of the log-normalizer;" in text
    assert "Calibration 1.07 good true over predicted normalizer, 1 is right" in text
    assert "Time 17 min 23 s for 512 k samples" in text
    assert "Samples per second 508 on cpu, 2 threads" in text
    assert "Peak memory 1.42 GB" in text


def test_the_verdict_is_at_the_top(run: RunFolder) -> None:
    text = visible_text(report(run))
    verdict = text[text.index(" Result ") : text.index(" Image to text ")]
    assert "the right caption comes first for 39.9 % of the images (383x chance)" in verdict
    assert "Calibration is 1.07: good. The normalizer error is 16x smaller than a mini-batch's." in verdict
    assert verdict.count(" Training The loss fell from ") == verdict.count(" Try next ") == 1


def test_what_was_not_measured_has_no_tile(run: RunFolder) -> None:
    for path in (run.summary, run.evaluation):
        path.unlink()
    assert re.findall(r"<dt>([^<]*)</dt>", report(run).partition('<dl class="tiles">')[2]) == [
        "Calibration",
        "Samples per second",
    ]
    run.records.unlink()
    page = report(run)
    assert '<dl class="tiles">' not in page and '<dl class="verdict">' not in page


def test_a_run_of_an_earlier_version_is_shown_without_the_newer_figures(run: RunFolder) -> None:
    newer = ("median_rank", "largest_class", "captions")
    older = [{key: line[key] for key in line if not key.endswith(newer)} for line in read_lines(run.evaluation)]
    write_lines(run.evaluation, older)
    change_summary(run, evaluation={key: older[-1][key] for key in older[-1] if "." in key})
    text = visible_text(report(run))
    assert "recall@10 79.6 % 76x chance Text to image" in text
    assert "Zero-shot, top-1 59.9 % 5.4x chance icons-30k/zero-shot/groups, 9 classes" in text


def test_a_set_that_was_not_measured_has_a_notice_at_the_top(run: RunFolder) -> None:
    change_summary(run, not_measured={"d/over": "120 of 960 samples cannot be used"})
    assert '<p class="notice" role="status">d/over was not measured: 120 of 960 samples cannot be used.' in report(run)


def test_a_finished_run_is_not_called_unfinished_though_the_budget_is_no_whole_number_of_batches(
    run: RunFolder,
) -> None:
    assert SETTINGS["train"]["samples"] % SETTINGS["train"]["batch_size"] != 0
    assert "has not finished" not in report(run)


def test_a_run_without_summary_says_how_far_it_is(run: RunFolder) -> None:
    run.summary.unlink()
    write_lines(run.records, read_lines(run.records)[:100])
    run.evaluation.unlink()
    text = visible_text(report(run))
    assert "This run has not finished: 128 k of 512 k samples seen (25.0 %)" in text
    assert re.search(r"Samples per second \d+ on cpu, 2 threads at the last record", text)
    assert "Result Nothing was evaluated so far." in text


def test_a_run_that_stopped_early_but_wrote_a_summary_is_called_unfinished(run: RunFolder) -> None:
    write_lines(run.records, read_lines(run.records)[:100])
    write_lines(run.evaluation, read_lines(run.evaluation)[:1])
    change_summary(run, samples_seen=128_000)
    assert "This run has not finished: 128 k of 512 k samples seen" in report(run)


@pytest.mark.parametrize(
    "name", ["settings", "records", "evaluation", "summary", "environment", "gallery", "skipped", "nothing else"]
)
def test_any_file_may_be_missing(run: RunFolder, name: str) -> None:
    if name == "nothing else":
        for path in (run.records, run.evaluation, run.summary, run.environment, run.gallery, run.skipped):
            path.unlink()
    else:
        getattr(run, name).unlink()
    page = report(run)
    structure(page)
    assert not re.search(r"\b(None|nan|inf|null)\b", visible_text(page))


@pytest.mark.parametrize("damage", [b"", b"[1, 2]\n", b"{broken\n", b"\xff\xfe\n", b"null\n"])
@pytest.mark.parametrize("name", ["settings", "records", "evaluation", "summary", "environment", "gallery", "skipped"])
def test_a_damaged_file_costs_its_own_part_of_the_page_only(run: RunFolder, name: str, damage: bytes) -> None:
    getattr(run, name).write_bytes(damage)
    page = report(run)
    structure(page)
    if damage == b"\xff\xfe\n":
        assert f"{getattr(run, name).name} could not be read" in page


def test_values_of_any_wrong_kind_are_ignored(run: RunFolder) -> None:
    odd = [None, "text", True, [], {}, -1, 0, 1e308, -1e308, 5e-324, 10**400]
    keys = [*read_lines(run.records)[0], "unknown"]
    write_lines(run.records, [dict.fromkeys(keys, value) for value in odd])
    write_lines(run.evaluation, [dict.fromkeys(read_lines(run.evaluation)[0], value) for value in odd])
    summary_keys = json.loads(run.summary.read_text())
    gallery = json.loads(run.gallery.read_text())
    for value in odd:
        run.summary.write_text(json.dumps(dict.fromkeys(summary_keys, value)))
        run.environment.write_text(json.dumps({"versions": value, "device": value, "threads": value}))
        run.settings.write_text(json.dumps(dict.fromkeys(SETTINGS, value)))  # JSON is YAML
        matches = dict.fromkeys(gallery["text_to_image"][0]["matches"][0], value)
        query = dict.fromkeys(gallery["image_to_text"][0], value)
        run.gallery.write_text(json.dumps({"image_to_text": [query, value], "text_to_image": [{"matches": [matches]}]}))
        structure(report(run))
        run.gallery.write_text(json.dumps({"image_to_text": value, "text_to_image": value}))
        structure(report(run))


@pytest.mark.parametrize(("name", "title"), [("clip", "CLIP"), ("siglip", "SigLIP")])
def test_an_objective_that_predicts_no_normalizer_has_nothing_to_calibrate(
    run: RunFolder, name: str, title: str
) -> None:
    run.settings.write_text(yaml.safe_dump(SETTINGS | {"objective": {"name": name}}))
    write_lines(run.records, [record | {"calibration": None} for record in read_lines(run.records)])
    change_summary(run, normalizer_error=None)
    text = visible_text(report(run))
    assert f"{title} predicts no normalizer: there is nothing to calibrate." in text
    assert "The normalizer error was not measured." in text


def test_readers_learn_what_the_normalizer_error_is_and_that_nobody_chose_the_queries(run: RunFolder) -> None:
    text = visible_text(report(run))
    assert "Mean squared difference between the estimated and the exact log-normalizer" in text
    assert "From icons-30k/new-drawings. The queries are drawn at random with the run's seed, not chosen." in text
    run.gallery.unlink()
    assert "No queries were kept" in report(run)


def test_a_folder_that_is_not_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a run")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        with pytest.raises(UserError) as refused:
            write_report(RunFolder(path))
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
        assert not (path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_failure_in_one_line(run: RunFolder) -> None:
    run.report.mkdir()
    with pytest.raises(RunFailed, match=r"cannot write .*report\.html"):
        write_report(run)


def test_the_report_imports_no_torch_numpy_or_drawing_libraries() -> None:
    loaded = "import sys, neuclip.report.page; print(*{'torch', 'numpy', 'matplotlib', 'PIL'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


def test_a_fine_tuned_run_shows_before_and_after_what_was_lost_and_the_merged_models(run: RunFolder) -> None:
    plain = report(run)
    make_fine_tuned(run)
    page = report(run)
    text = visible_text(page)
    recall = json.loads(run.summary.read_text())["evaluation"][f"{HELD_OUT[0]}.image_to_text_recall_at_1"]
    assert f"{percent(recall)} before {percent(0.3 * recall)}" in text
    for words in (
        "Before and after training",
        "Merged with the start",
        "Since the start, recall@1 fell",
    ):
        assert words in text and words not in visible_text(plain)


def test_an_evaluation_before_the_first_step_alone_is_not_compared_with_itself(run: RunFolder) -> None:
    make_fine_tuned(run)
    run.summary.unlink()
    run.evaluation.write_text(run.evaluation.read_text().splitlines(keepends=True)[0])
    assert "before" not in visible_text(report(run)).split("Curves")[0]
