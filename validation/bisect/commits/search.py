"""The search over commits: every verdict is kept as it comes, so that a search killed at any moment resumes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from validation.bisect.commits.bayes import GUESSED_WRONG, Standing, standing
from validation.bisect.commits.git import GitError, bisect, first_parents, git, parent, worktree
from validation.bisect.commits.state import Answer, Method, Outcome, State, write_state
from validation.bisect.commits.trial import run_trial
from validation.errors import RunInterrupted, UsageError
from validation.records.storage import RunFolder
from validation.verdict import Verdict

Told = Callable[[str], None]

_FOUND = "# first bad commit: ["
_POSSIBLE = "# possible first bad commit: ["


class _Spent(Exception):
    """No run is left."""


@dataclass
class CommitSearch:
    """One search; `state` is what the state file says."""

    folder: RunFolder
    state: State
    told: Told = lambda line: None

    def __post_init__(self) -> None:
        self._repo = Path(self.state.question.repo)

    def finish(self) -> Answer:
        """Go on until there is an answer, and keep it.

        Raises:
            UsageError: the command said that it makes no sense to go on, or an end cannot be judged.
            GitError: git could not do what it was asked to.
            RunInterrupted: after KeyboardInterrupt, with every verdict so far kept.
        """
        question = self.state.question
        # git notes a worktree by its last name, which must not be another run's.
        path = self.folder.path.resolve() / f"tree-{self.folder.run_id}"
        with self.folder.lock():
            write_state(self.folder, self.state)
            try:
                with worktree(self._repo, path, question.bad) as self._tree:
                    answer = self._plain() if question.method is Method.PLAIN else self._bayes()
            except _Spent:
                runs = len(self.state.trials)
                more = f"go on with: {self.resume_command()} --most-runs {2 * runs}"
                answer = Answer(verdict=Verdict.INCONCLUSIVE, summary=f"{runs} runs were not enough; {more}")
            except UsageError as error:
                raise UsageError(f"{error}; once it is mended, go on with: {self.resume_command()}") from error
            except GitError as error:
                raise GitError(f"{error}; once it is mended, go on with: {self.resume_command()}") from error
            except KeyboardInterrupt:
                raise RunInterrupted(f"interrupted; go on with: {self.resume_command()}") from None
            self.state = self.state.model_copy(update={"answer": answer})
            write_state(self.folder, self.state)
        return answer

    def resume_command(self) -> str:
        """The command that goes on with this search."""
        out = self.folder.path.parent
        where = [] if str(out) == "runs" else ["--out", str(out)]
        return shlex.join(["decodegate", "bisect", "commits", "--resume", self.folder.run_id, *where])

    def _trial(self, commit: str) -> Outcome:
        trials = self.state.trials
        if len(trials) >= self.state.question.most_runs:
            raise _Spent
        trial = run_trial(self.state.question, self.folder, self._tree, commit, len(trials) + 1)
        self.state = self.state.model_copy(update={"trials": [*trials, trial]})
        write_state(self.folder, self.state)
        self.told(f"run {len(self.state.trials)}: {commit[:12]} {trial.outcome} ({trial.why})")
        return trial.outcome

    def _outcome(self, commit: str, time: int = 1) -> Outcome:
        """The verdict of the commit's first, or second, run: the one kept, or a new one."""
        while len(kept := [trial for trial in self.state.trials if trial.commit == commit]) < time:
            self._trial(commit)
        return kept[time - 1].outcome

    def _plain(self) -> Answer:
        """`git bisect`, with both ends judged before and the result judged again after."""
        question = self.state.question
        ends = {name: self._outcome(commit) for name, commit in (("--good", question.good), ("--bad", question.bad))}
        for name, outcome in ends.items():
            if outcome is Outcome.SKIP:
                return self._answer(Verdict.INCONCLUSIVE, f"{name} cannot be judged; give a commit that can")
        if ends["--good"] is Outcome.BAD:
            return self._answer(Verdict.INCONCLUSIVE, "--good fails too: look further back")
        if ends["--bad"] is Outcome.GOOD:
            return self._answer(Verdict.PASS, "nothing to bisect: --bad passes")
        bisect(self._tree, ["start", question.bad, question.good])
        while not (suspects := self._suspects()):
            commit = git(self._tree, "rev-parse", "HEAD").strip()
            bisect(self._tree, [str(self._outcome(commit)), commit])
        if len(suspects) > 1:
            return self._answer(
                Verdict.INCONCLUSIVE,
                "the first bad commit is one of these; the others between them cannot be judged",
                suspects,
            )
        return self._confirmed(suspects[0])

    def _suspects(self) -> list[str]:
        """What `git bisect` has narrowed the search to: the first bad commit, or those left that it may be."""
        lines = git(self._tree, "bisect", "log").splitlines()
        for mark in (_FOUND, _POSSIBLE):
            ids = [line.removeprefix(mark).split("]")[0] for line in lines if line.startswith(mark)]
            if ids:
                order = git(self._repo, "rev-list", "--reverse", "--no-walk=sorted", *ids).split()
                return list(dict.fromkeys(order))
        return []

    def _confirmed(self, commit: str) -> Answer:
        """The answer, if the commit is bad again and its parent good again."""
        again = self._outcome(commit, 2), self._outcome(parent(self._repo, commit), 2)
        if again != (Outcome.BAD, Outcome.GOOD):
            said = f"judged again, it is {again[0]} and its parent {again[1]}"
            return self._answer(Verdict.INCONCLUSIVE, f"verdicts do not repeat ({said}); use --method bayes", [commit])
        return self._answer(Verdict.FAIL, "its parent is good, twice; it is bad, twice", [commit])

    def _bayes(self) -> Answer:
        """Ask where a verdict tells most until one commit, and that anything changed, is as likely as was asked.

        Or that nothing did.
        """
        question = self.state.question
        history = first_parents(self._repo, question.good, question.bad)
        while True:
            now = standing(history, self.state.trials, question.posterior, question.wrong)
            if min(now.posterior, now.change) >= question.posterior:
                return self._likeliest(now)
            if 1 - now.change >= question.posterior:
                return self._unchanged(now)
            self._trial(now.next_commit)

    def _unchanged(self, now: Standing) -> Answer:
        failures, runs = now.after[0] + now.before[0], now.after[1] + now.before[1]
        said = f"{failures} of {runs} runs fail, and no commit changed that (posterior {1 - now.change:.4f})"
        if failures <= GUESSED_WRONG * runs:
            return self._answer(Verdict.PASS, f"nothing to bisect: {said}")
        return self._answer(Verdict.INCONCLUSIVE, f"--good fails as often as --bad: {said}; look further back")

    def _likeliest(self, now: Standing) -> Answer:
        summary = (
            f"posterior {now.posterior:.4f}; {now.after[0]} of {now.after[1]} runs fail from here on, "
            f"{now.before[0]} of {now.before[1]} before"
        )
        if now.after[0] * now.before[1] <= now.before[0] * now.after[1]:
            return self._answer(Verdict.INCONCLUSIVE, f"failures became rarer, not commoner ({summary})", now.suspects)
        if len(now.suspects) > 1:
            summary = f"one of these; the older ones cannot be judged ({summary})"
            return self._answer(Verdict.INCONCLUSIVE, summary, now.suspects)
        return self._answer(Verdict.FAIL, summary, now.suspects)

    def _answer(self, verdict: Verdict, summary: str, suspects: list[str] | tuple[str, ...] = ()) -> Answer:
        return Answer(verdict=verdict, summary=summary, suspects=list(suspects))


def reproduce(state: State, commit: str, folder: Path) -> list[str]:
    """Commands, one a line, that build and judge one commit again in a worktree of their own."""
    question = state.question
    tree = str(folder.resolve() / f"again-{commit[:12]}")
    lines = [["git", "-C", question.repo, "worktree", "add", "--detach", tree, commit], ["cd", tree]]
    lines += [question.build] if question.build else []
    return [shlex.join(words) for words in [*lines, question.command]]
