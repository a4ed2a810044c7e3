"""The paper's tables and figures: what their files define, what is run, what survives, and what their pages say."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.experiments import definition
from neuclip.experiments.definition import TRAIN, Job, read_experiment
from neuclip.experiments.page import failures, tuning_tables
from neuclip.experiments.paper_scale import paper_command, paper_jobs, slurm_script
from neuclip.experiments.perform import Request, write_pages
from neuclip.experiments.records import read_records, record_failed
from neuclip.experiments.runner import (
    Running,
    expected_seconds,
    known_data,
    progress_of,
    resolved,
    run_jobs,
    waiting_jobs,
)
from neuclip.records import RunFolder, append_line
from tests.builders.images import write_shard
from tests.builders.run_folders import write_results, write_run

ALL = definition.experiments()


def planned(name: str, scale: str) -> list[Job]:
    """As if every first try had won."""
    experiment, request = read_experiment(name), Request(scale)
    best = {choice: tries[0][0] for choice, tries in request.tried(experiment).items()}
    return definition.plan(experiment, scale, request.cases(experiment), best=best) + request.tuning(experiment)


# What the files define


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
@pytest.mark.parametrize("name", ALL)
def test_every_job_has_settings_that_train_accepts_and_a_key_of_its_own(name, scale):
    jobs = planned(name, scale)
    assert jobs and (scale == "smoke" or len({job.key for job in jobs}) == len(jobs))  # there samples are the same
    for job in jobs if read_experiment(name).kind == TRAIN else ():
        assert definition.typed_settings(job)["run.seed"] == int(job.settings["run.seed"])


@pytest.mark.parametrize("name", ALL)
def test_the_tables_of_the_paper_are_rectangular_and_its_runs_are_recipes(name):
    experiment = read_experiment(name)
    for table in experiment.paper:
        assert {len(row) for row in table["rows"]} == {len(table["head"])}
    for job in paper_jobs(experiment):
        assert definition.typed_settings(job)["train.samples"] >= 100_000_000


def test_every_method_has_as_many_tries():
    tried = definition.tuning_plan(read_experiment("comparison"), "laptop", ["photos, batch 128, 197k samples"])
    assert {len(tries) for tries in tried.values()} == {12}
    assert not {job.settings["run.seed"] for tries in tried.values() for _, job in tries} & {str(n) for n in range(50)}
    assert all(job.settings["evaluation.retrieval"] == "auto" for tries in tried.values() for _, job in tries)


def test_tries_have_the_learning_rates_of_the_runs_that_take_them_over():
    comparison, case = read_experiment("comparison"), "photos, batch 32, 393k samples"
    choice = ("photos, batch 32, 197k samples", "mini-batch form")
    tries = definition.tuning_plan(comparison, "laptop", [case])[choice]
    for (chosen, tried), rate in zip(tries, [5e-4, 1e-3] * 6, strict=True):
        (run,) = definition.plan(comparison, "laptop", [case], 1, {choice: chosen})
        assert {float(job.settings["optimizer.learning_rate"]) for job in (run, tried)} == {rate}


def test_a_try_is_chosen_by_training_pairs_that_are_held_out_not_by_what_is_reported(tmp_path):
    request = Request("laptop", words="icons, batch 128", results=tmp_path)
    tried = request.tried(read_experiment("comparison"))
    for tries in tried.values():
        for _, job in tries:
            is_last = job is tries[-1][1]
            figures = {"icons-30k/new-drawings.recall_at_1": 0.2 - 0.1 * is_last}
            figures |= {"icons-30k#held-out.recall_at_1": 0.1 + 0.1 * is_last}
            append_line(tmp_path / "runs.jsonl", {"key": job.key, "finished": True, "evaluations": [figures]})
    chosen = {job.variant: job.settings for job in request.jobs(read_experiment("comparison"))}
    for (_, variant), tries in tried.items():
        assert tries[-1][0].items() <= chosen[variant].items()
    (table,) = tuning_tables(tried, read_records(tmp_path), "recall_at_1").values()
    assert [str(row[2]) for row in table.rows if "chosen" in str(row[2])] == ["20.0 % (chosen)"] * len(tried)


def test_what_drrho_compares_with_has_not_seen_the_pairs_that_its_tries_are_measured_on():
    tried = definition.tuning_plan(read_experiment("comparison"), "laptop", ["photos, batch 128, 393k samples"])
    tries = [job.settings for _, job in tried["photos, batch 128, 197k samples", "DRRho"]]
    reference = definition.reference_job("laptop", "photos")
    assert {one[definition.REFERENCE] for one in tries} == {reference.key}
    for name in ("data", "data.hold_out", "run.seed"):
        assert {one[name] for one in tries} == {reference.settings[name]}


def test_a_reference_is_trained_only_for_runs_that_wait_and_again_for_those_that_are_retried(tmp_path):
    request, comparison = Request("smoke", seeds=1, results=tmp_path), read_experiment("comparison")
    reference = definition.reference_job("smoke", "icons")
    assert request.references(comparison, retry=False) == [reference]
    for job in request.tuning(comparison):
        record_failed(tmp_path, job, "no reference")
    assert request.references(comparison, retry=True) == [reference]
    waiting = {job.variant for job in request.jobs(comparison)}
    assert "DRRho" in waiting and request.references(comparison, retry=False) == [reference]
    for job in request.jobs(comparison):
        record_failed(tmp_path, job, "no reference")
    assert request.references(comparison, retry=False) == []
    assert request.references(comparison, retry=True) == [reference]


def test_a_variant_may_differ_between_cases_and_leave_some_out():
    def settings(case: str, variant: str) -> definition.Flat | None:
        return definition.settings_of(read_experiment("comparison"), "laptop", case, variant, {})

    large, small = (settings(f"photos, batch {size}", "NeuCLIP") for size in ("128, 197k samples", "32, 393k samples"))
    assert large is not None and small is not None and small["objective.num_prototypes"] == "256"
    assert "objective.num_prototypes" not in large and float(small["optimizer.learning_rate"]) == 0.0005
    assert settings("icons, batch 32, 393k samples", "queue") is None
    assert settings("photos, batch 128, 197k samples", "queue") is not None


def test_experiments_share_runs_with_equal_settings():
    keys = {name: {job.variant: job.key for job in planned(name, "laptop") if job.seed == 0} for name in ALL}
    assert keys["restarts"]["every 16 steps"] == keys["prototypes"]["m 1,024"] == keys["simultaneous"]["alternating"]


def test_a_script_for_slurm_runs_each_command_once(tmp_path):
    experiment = read_experiment("restarts")
    jobs = paper_jobs(experiment)
    script = tmp_path / "run.slurm"
    script.write_text(slurm_script(experiment, jobs, "runs").replace('eval "', 'echo "'))
    shown = [
        subprocess.run(
            ["bash", script], env={"SLURM_ARRAY_TASK_ID": str(n)}, capture_output=True, text=True, check=True
        )
        for n in range(len(jobs))
    ]
    assert [one.stdout.strip() for one in shown] == [paper_command(job, "runs") for job in jobs]
    assert "--objective.restart_every 2500" in " ".join(one.stdout for one in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["restarts"], "restarts needs the data set photos; give --data photos=PATH, or --data own=PATH"),
        (["gradient", "--cases", "batch 3"], "gradient needs the data set photos"),
        (
            ["gradient", "--cases", "batch 7"],
            "no case of gradient contains 'batch 7'; its cases are: photos, batch 128",
        ),
        (["restarts", "--seeds=-1"], "--seeds is -1; give 0 or more"),
        (["restarts", "--scale", "lap"], "did you mean laptop?"),
        (["restarts", "--data", "none=."], "with a NAME of photos, photos-tenth, own"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line_and_nothing_is_written(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_data_without_a_path_is_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match="NAME=PATH"):
        known_data(["fotos=/"])
    with pytest.raises(UserError, match=r"there is no folder .*nowhere; give one with folders train and test"):
        known_data([f"photos={tmp_path / 'nowhere'}"])
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"there is no folder .*/test"):
        known_data([f"own={tmp_path}"])
    with pytest.raises(UserError, match="did you mean"):
        read_experiment("restart")


# Running


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for part, numbers in (("train", range(40)), ("test", range(40, 52))):
        write_shard(folder / part / "a.tar", numbers)
    return {"own": str(folder)}


@pytest.mark.parametrize("name", ["photos", "own"])
def test_tries_are_measured_on_pairs_of_train_and_reported_runs_on_test(name, data, tmp_path):
    comparison, places = read_experiment("comparison"), {name: data["own"]}
    request = Request("laptop", words="batch 128", data=places)
    best = {choice: tries[0][0] for choice, tries in request.tried(comparison).items()}
    reported = definition.plan(comparison, "laptop", request.cases(comparison), best=best)
    jobs = {"auto": request.tuning(comparison), f"test={data['own']}/test": reported}
    for measured_on, group in jobs.items():
        for job in (one for one in group if one.settings["data"] == name and definition.REFERENCE not in one.settings):
            settings = resolved(job, tmp_path, places)
            assert settings["evaluation.retrieval"] == measured_on
            assert (int(settings["data.hold_out"]) > 0) == (measured_on == "auto")


def small_jobs(**more: str) -> list[Job]:
    experiment = read_experiment("simultaneous")
    jobs = definition.plan(experiment, "smoke", ["own data"], seeds=1)[:2]
    return [job._replace(settings=job.settings | {"train.samples": "64"} | more) for job in jobs]


def test_a_killed_runner_loses_nothing_and_a_failed_run_is_recorded_and_tried_again(tmp_path, data):
    results, runs = tmp_path / "results", tmp_path / "runs"
    (broken,) = small_jobs(**{"model.name": "no-such-model"})[:1]
    assert run_jobs([broken], results, runs, parallel=1, data=data, keep=False) == 1
    failed = read_records(results)[broken.key]
    assert not failed["finished"] and "no-such-model" in failed["error"]
    assert waiting_jobs([broken], read_records(results)) == []
    assert waiting_jobs([broken], read_records(results), retry=True) == [broken]
    (section,) = failures([broken], read_records(results))
    assert "no-such-model" in str(section)

    jobs = small_jobs()
    script = f"""
from pathlib import Path
from tests.experiments.test_experiments import run_jobs, small_jobs
run_jobs(small_jobs(), Path({str(results)!r}), Path({str(runs)!r}), parallel=2, data={data!r}, keep=False)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert any("1 of 2" in line for line in child.stderr)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert run_jobs(waiting_jobs(jobs, read_records(results)), results, runs, parallel=2, data=data, keep=False) == 0
    records = read_records(results)
    assert all(records[job.key]["finished"] for job in jobs)
    assert not [path for path in runs.iterdir() if path.is_dir()]
    lines = [json.loads(line) for line in (results / "runs.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines].count(jobs[0].key) == 1


def test_one_line_says_what_each_running_job_does(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    jobs = small_jobs()
    (tmp_path / f"{jobs[0].name}.log").write_text("storing features\nstep 12  loss 0.5\n")
    line = progress_of([Running(job, None, 0.0) for job in jobs], tmp_path)
    first, second = line.split(" | ")
    assert first.startswith(f"{jobs[0].variant}, seed 0: step 12") and second.startswith(jobs[1].variant)
    assert len(line) <= 100


def test_a_failed_run_is_on_the_page_and_the_command_ends_with_1(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setitem(definition.common()["scales"]["smoke"]["always"], "model.name", "no-such-model")
    places = [f"--{what}={tmp_path / what}" for what in ("results", "runs", "pages")]
    own = ["experiment", "length", "--scale=smoke", "--seeds=1", f"--data=own={data['own']}", *places]
    count = len(read_experiment("length").variants)
    assert main(own) == 1 and f"{count} runs failed; the page says why; --retry" in capsys.readouterr().err
    assert "no-such-model is not known" in (tmp_path / "pages" / "length.html").read_text()
    assert main(own) == 0 and f"{count} failed before and not tried again without --retry" in capsys.readouterr().err
    assert main([*own, "--retry"]) == 1


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.parametrize("name", ALL)
def test_every_experiment_runs_at_scale_smoke_and_writes_its_page(name, smoke, data, capsys):
    places = [f"--{what}={smoke / what}" for what in ("results", "runs", "pages")]
    own = ["experiment", name, "--scale=smoke", "--seeds=1", "--parallel=2", f"--data=own={data['own']}", *places]
    assert main(own) == 0, capsys.readouterr().err
    before = (smoke / "results" / "runs.jsonl").read_text()
    assert all(json.loads(line)["finished"] for line in before.splitlines())
    page = (smoke / "pages" / f"{name}.html").read_text()
    assert read_experiment(name).question in html.unescape(page)
    assert main(own) == 0 and (smoke / "results" / "runs.jsonl").read_text() == before  # nothing is run twice


# Pages


def invent(results: Path, request: Request, ahead: dict[str, float]) -> None:
    """Records of all runs: a variant's recall is its lead plus what its seed adds."""
    experiment = read_experiment("simultaneous")
    for job in request.jobs(experiment):
        recall = 0.2 + ahead.get(job.variant, 0.0) + 0.001 * job.seed + 0.0005 * (len(job.variant) % 3) * (job.seed % 2)
        lines = [{"samples": part * 98_304, "test.recall_at_1": recall * part / 2} for part in (1, 2)]
        about = {"key": job.key, "kind": job.kind, "case": job.case, "settings": job.settings, "finished": True}
        append_line(
            results / "runs.jsonl",
            about | {"wall_seconds": 30, "summary": {"samples_seen": 196_608}, "evaluations": lines},
        )


def test_the_page_names_who_is_first_and_what_is_not_shown(tmp_path):
    request = Request("laptop", results=tmp_path)
    invent(tmp_path, request, {"alternating": 0.03})
    pages = write_pages([read_experiment("simultaneous")], request, tmp_path / "pages")
    text = (tmp_path / "pages" / "simultaneous.html").read_text()
    assert "alternating is best, recall@1 23" in text
    assert "; ahead of CLIP (+3" in text and "mini-batch form (+3" in text
    assert "alternating</span></td>" in (tmp_path / "pages" / "index.html").read_text()
    assert "**+3" in (tmp_path / "pages" / "simultaneous.md").read_text()
    rows = (tmp_path / "pages" / "simultaneous.csv").read_text().splitlines()
    assert rows[0].startswith("case,group,run,seed") and len(rows) == 1 + 5 * 4
    assert {path.suffix for path in pages} == {".html", ".md", ".csv", ".tex"}


def test_a_baseline_that_is_better_than_every_variant_is_named_and_not_called_best(tmp_path):
    request = Request("laptop", results=tmp_path)
    invent(tmp_path, request, {"CLIP": 0.05, "alternating": 0.03})
    write_pages([read_experiment("simultaneous")], request, tmp_path / "pages")
    text = (tmp_path / "pages" / "simultaneous.html").read_text()
    assert "alternating is best" in text and "; ahead of mini-batch form (+" in text and "; behind CLIP (−" in text


def test_a_variant_with_fewer_seeds_than_another_is_not_called_best(tmp_path):
    request, experiment = Request("laptop", results=tmp_path), read_experiment("simultaneous")
    invent(tmp_path, request, {"simultaneous": 0.05, "alternating": 0.03})
    late = [job.key for job in request.jobs(experiment) if job.variant == "simultaneous" and job.seed > 0]
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["key"] not in late))
    write_pages([experiment], request, tmp_path / "pages")
    assert "alternating is best" in (tmp_path / "pages" / "simultaneous.html").read_text()


def test_the_page_of_costs_has_the_network_s_share_of_a_step_and_memory_beside_clip_s(tmp_path):
    request, cost = Request("laptop", results=tmp_path), read_experiment("cost")
    steps = {"CLIP": (640.0, 0.1, 1e9), "mini-batch form": (640.0, 0.1, 1e9), "NeuCLIP": (512.0, 0.28, 1.1e9)}
    for job in request.jobs(cost):
        if job.variant in steps:
            names = ("steady_samples_per_second", "normalizer_share", "peak_memory_bytes")
            summary = dict(zip(names, steps[job.variant], strict=True)) | {"samples_per_second": 1.0}
            about = {"key": job.key, "kind": job.kind, "case": job.case, "settings": job.settings, "finished": True}
            append_line(tmp_path / "runs.jsonl", about | {"wall_seconds": 30, "summary": summary, "evaluations": []})
    write_pages([cost], request, tmp_path / "pages")
    assert "of a step, the network takes 20.0 % in NeuCLIP." in (tmp_path / "pages" / "cost.html").read_text()
    table = (tmp_path / "pages" / "cost.md").read_text()
    assert "| CLIP | 200.0 | 20.0 | 0.0 | 0 % | 1,000 | 0 % |" in table
    assert "| NeuCLIP | 250.0 | 70.0 | 50.0 | 20.0 % | 1,100 | 10.0 % |" in table


def test_the_expected_time_follows_from_runs_of_the_same_case(tmp_path):
    def record(job: Job, seconds: float) -> dict:
        return {"finished": True, "case": job.case, "settings": job.settings, "wall_seconds": seconds}

    short, long = small_jobs()[0], small_jobs(**{"train.samples": "6400"})[1]
    alone = expected_seconds([long], {"a": record(short, 6.0)}, parallel=1)
    assert alone == pytest.approx(602.0) and expected_seconds([long] * 2, {"a": record(short, 6.0)}, 2) == alone
    other = record(short, 60.0) | {"case": "another"}
    assert expected_seconds([long], {"a": record(short, 6.0), "b": other}, parallel=1) == alone
    assert expected_seconds([long], {"b": other}, parallel=1) == expected_seconds([long], {}, parallel=1) < alone


def test_equal_methods_get_no_verdict(tmp_path):
    request = Request("laptop", results=tmp_path)
    invent(tmp_path, request, {})
    write_pages([read_experiment("simultaneous")], request, tmp_path / "pages")
    assert "**" not in (tmp_path / "pages" / "simultaneous.md").read_text()


def test_the_same_records_give_the_same_bytes(tmp_path):
    request = Request("laptop", results=tmp_path)
    invent(tmp_path, request, {"alternating": 0.03})
    every = [read_experiment(name) for name in ALL]
    first, second = (
        [path.read_bytes() for path in write_pages(every, request, tmp_path / name)] for name in ("one", "two")
    )
    assert first == second and b"simultaneous.html" in first[-1]


def test_the_list_and_the_paper_s_commands_need_no_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ALL
    assert main(["experiment", "inner-steps", "--scale", "paper"]) == 0
    assert "neuclip recipe dfn-14m neuclip >" in capsys.readouterr().out
    assert (tmp_path / "experiments" / "inner-steps.slurm").is_file()
    assert main(["experiment", "convergence", "--scale", "paper"]) == 2
    assert "convergence has no runs at the paper's scale; give --scale laptop" in capsys.readouterr().err


def test_runs_of_the_paper_s_scale_that_came_back_give_the_same_page(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for job in paper_jobs(read_experiment("inner-steps"))[:2]:
        run = write_run(tmp_path / "runs" / job.name, [0.1, 0.2])
        write_results(RunFolder(run).tasks, add=0.1 * ("t-u-5" in job.name))
    assert main(["experiment", "inner-steps", "--scale", "paper", "--runs", "runs"]) == 0
    text = (tmp_path / "experiments" / "inner-steps.html").read_text()
    assert "T_u 5 is best, mean of 38 tasks" in text and "39.16" in text
    assert len(list((tmp_path / "runs").iterdir())) == 2  # they stay
