"""Show searches for prompts, also while they run, and learned prompts with their originals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightspan.errors import LightspanError, how_to_install
from lightspan.schema.prompts import PromptTemplate
from lightspan_ui import views
from lightspan_ui.run_files import LiveRunFolder
from lightspan_ui.runs import finite

if TYPE_CHECKING:
    from lightspan_prompts.search.candidates import Candidate, Proposal, SearchResult
    from lightspan_prompts.search.running import RunningSearch


def prompts_of(folder: LiveRunFolder, state: views.RunState) -> views.Prompts:
    """Return what a run learned about prompts, or has found so far.

    The tasks of the searches have no texts yet: only the store of the run has them.

    Args:
        folder: folder of the run.
        state: state of the run.

    Raises:
        LightspanError: lightspan-prompts is not installed, or a file of the run is damaged.
    """
    try:
        from lightspan_prompts.search.candidates import read_searches
        from lightspan_prompts.search.running import read_running_searches
    except ModuleNotFoundError as error:
        raise LightspanError(
            f"to see the candidates of a search: {how_to_install('prompts')}"
        ) from error
    config = folder.read_config()
    failure_reward = config.get("failure_reward")
    found = {name: result_view(name, each) for name, each in read_searches(folder.path).items()}
    running = read_running_searches(folder.path, 0.0 if failure_reward is None else failure_reward)
    is_running = state in ("running", "silent")
    found |= {name: running_view(name, each, is_running) for name, each in running.items()}
    prompts = [
        views.PromptView(
            name=name,
            before=prompt.before.text,
            after=prompt.after.text,
            is_changed=prompt.is_changed,
        )
        for name, prompt in folder.prompts().items()
    ]
    return views.Prompts(searches=[found[name] for name in sorted(found)], prompts=prompts)


def result_view(name: str, search: SearchResult) -> views.SearchView:
    """Return a search that has ended.

    Args:
        name: name of the search, empty or such as `step-000003`.
        search: its result.
    """
    return views.SearchView(
        name=short_name(name),
        is_running=False,
        candidates=candidate_views(search.candidates, search.chosen, search.best),
        proposals=[proposal_view(each) for each in search.proposals],
        tasks=task_names(search.candidates),
        verdict=search.verdict(),
        chance=search.chance,
        ended=search.ended,
        rollouts=search.rollouts,
        reflections=search.reflections,
        tokens=search.tokens,
        cost=search.cost,
        texts=search.texts(),
    )


def running_view(name: str, search: RunningSearch, is_running: bool) -> views.SearchView:
    """Return a search without a result. Its best candidate so far is no verdict yet.

    Args:
        name: name of the search, empty or such as `step-000003`.
        search: the search.
        is_running: whether its run goes on.
    """
    return views.SearchView(
        name=short_name(name),
        is_running=is_running,
        candidates=candidate_views(search.candidates, None, best_of(search.candidates)),
        proposals=[proposal_view(each) for each in search.proposals],
        tasks=task_names(search.candidates),
        verdict="",
        chance=None,
        ended="" if is_running else "the run was stopped",
        rollouts=search.rollouts,
        reflections=search.reflections,
        tokens=search.tokens,
        cost=search.cost,
        texts="",
    )


def candidate_views(
    candidates: Sequence[Candidate], chosen: int | None, best: int | None
) -> list[views.CandidateView]:
    """Return the candidates of a search.

    Args:
        candidates: the candidates.
        chosen: number of the candidate whose prompts are used; None before the search has ended.
        best: number of the candidate with the highest mean; None if there is none.
    """
    return [
        views.CandidateView(
            number=number,
            parents=candidate.parents,
            mean=finite(candidate.mean),
            scores=candidate.rewards,
            again=candidate.again,
            is_chosen=number == chosen,
            is_best=number == best,
            is_whole=candidate.is_whole,
            rollouts=candidate.rollouts,
            changed=changed_prompts(candidates, candidate),
            texts={name: PromptTemplate(t).text for name, t in candidate.templates.items()},
        )
        for number, candidate in enumerate(candidates)
    ]


def changed_prompts(candidates: Sequence[Candidate], candidate: Candidate) -> list[str]:
    """Return the names of the prompts in which a candidate differs from all its parents."""
    parents = [candidates[number] for number in candidate.parents if number < len(candidates)]
    if not parents:
        return []
    return [
        name
        for name, text in candidate.templates.items()
        if all(parent.templates.get(name) != text for parent in parents)
    ]


def best_of(candidates: Sequence[Candidate]) -> int | None:
    """Return the number of the candidate with the highest mean on all tasks; None if none has."""
    whole = [n for n, each in enumerate(candidates) if each.is_whole and math.isfinite(each.mean)]
    return max(whole, key=lambda number: candidates[number].mean, default=None)


def proposal_view(proposal: Proposal) -> views.ProposalView:
    """Return a proposed text and what became of it."""
    return views.ProposalView(
        prompt=proposal.prompt,
        parents=proposal.parents,
        text=proposal.text,
        before=proposal.before,
        after=proposal.after,
        tasks=proposal.tasks,
        candidate=proposal.candidate,
        why=proposal.why,
    )


def task_names(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return the tasks by which candidates are compared, without their texts."""
    return {name: "" for each in candidates for name in (*each.rewards, *each.again)}


def short_name(name: str) -> str:
    """Return the name of a search without leading zeros, such as `step-3`."""
    step = name.removeprefix("step-")
    return f"step-{int(step)}" if step.isdecimal() else name
