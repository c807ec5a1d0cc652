"""Environments of `verifiers` as rows and as an agent. The package is none of the project's: skipped where it is missing."""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

verifiers = pytest.importorskip("verifiers")

from replayed_client import replayed_client  # noqa: E402

from rlinf_vl.config import load_config  # noqa: E402
from rlinf_vl.config.hubs import rows_path  # noqa: E402
from rlinf_vl.data.dataset import ProblemDataset  # noqa: E402
from rlinf_vl.data.sources import open_source  # noqa: E402
from rlinf_vl.extras.agents import AgentTask  # noqa: E402
from rlinf_vl.extras.verifiers.agent import RolloutError, solve  # noqa: E402
from rlinf_vl.extras.verifiers.rows import environment_row, load_environment  # noqa: E402
from rlinf_vl.rollout.episode.env_makers import env_maker_of  # noqa: E402
from rlinf_vl.rollout.episode.row_check import RowCheck  # noqa: E402


def path_of(**arguments):
    return rows_path("verifiers-toy", arguments)


def task_of(split="train", row=0, **arguments):
    return AgentTask(ProblemDataset([path_of(**arguments)], split)[row], 1, 2)


def test_rows_are_the_environments_own():
    path = path_of(rows=8)
    rows = ProblemDataset([path], "train")
    environment = load_environment(path)
    assert len(rows) == 8 and len(ProblemDataset([path], "val")) == 8
    for number, own in enumerate(environment.get_dataset()):
        problem = rows[number]
        assert problem.answer == own["answer"] and problem.images == ()
        assert problem.messages[-1]["content"][0]["text"] == own["prompt"][0]["content"][1]["text"]
        assert environment_row(**problem.columns["verifiers"]) == own
    # The evaluation set for validation, and no row has another's name.
    assert rows.row_id(0) == "verifiers-toy-train:0"
    assert task_of("val").columns["verifiers"]["subset"] == "eval"


@pytest.mark.parametrize("right", [True, False])
def test_the_rubrics_reward_is_the_agents(right):
    task = task_of(rows=8, tries=2)
    reply = f"so \\boxed{{{task.answer if right else 'no'}}}"
    client, requests = replayed_client([reply, reply])
    result = asyncio.run(solve(task, client))
    assert result.metrics["right"] == right and result.metrics["num_turns"] == 2 - right
    brief = 1 / (1 + len(reply)) if right else 1 / (2 + 2 * len(reply))
    assert result.reward == pytest.approx(right + brief / 4)
    # Their own messages, pictures included, and nothing that would change the sampling.
    first = requests[0]
    assert first["messages"][0]["content"][0]["image_url"]["url"].startswith(
        "data:image/png;base64,"
    )
    assert not first.keys() & {"temperature", "top_p", "seed"}


def test_an_empty_reply_is_paid_and_a_failed_rollout_is_an_error():
    task = task_of(rows=8)
    assert asyncio.run(solve(task, replayed_client([""])[0])).reward == 0.25
    with pytest.raises(RolloutError, match="the line was cut"):
        asyncio.run(solve(task, replayed_client([])[0]))


def test_answers_need_not_be_of_the_kind_that_the_runs_reward_functions_take():
    paths = ("data.train_data_paths=[verifiers://verifiers-toy]", "data.val_data_paths=[]")
    overrides = ("rollout.env_class=verifiers:verifiers-toy", "+rollout.env_kwargs.kind=phrases")
    config = load_config("toy-grpo-cpu", (*paths, *overrides))
    rows = ProblemDataset(config.data.train_data_paths, "train")
    check = RowCheck(config, None, env_maker_of(config))
    result = check.filter(rows, range(4), lambda *_: None)
    assert list(result.kept) == [0, 1, 2, 3] and not result.bad


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(
        ValueError, match="verifiers:verifiers-toy can't be made.*a file that is mis"
    ):
        open_source(path_of(kind="broken"), "train")
    with pytest.raises(ValueError, match="reward functions of whole groups"):
        open_source(path_of(kind="groups", rows=2), "train")
    with pytest.raises(ValueError, match="no module 'no_such'"):
        open_source("verifiers://no-such", "train")


def test_an_environment_that_draws_other_rows_in_another_process_is_an_error():
    task = task_of(kind="unstable", rows=2)
    from rlinf_vl.extras.verifiers import rows as verifiers_rows

    verifiers_rows._load.cache_clear()  # as in another process
    with pytest.raises(ValueError, match="another question in this process.*a seed"):
        asyncio.run(solve(task, replayed_client(["1"])[0]))


def test_it_is_made_once_in_any_thread_and_keeps_the_handlers():
    handler = signal.getsignal(signal.SIGINT)
    path = path_of(rows=3)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(load_environment, [path] * 4))
    assert len(set(map(id, made))) == 1
    assert signal.getsignal(signal.SIGINT) is handler and threading.active_count() < 50
