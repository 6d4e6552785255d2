"""A git repository seen from outside: its checkout, its index and its branches stay as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tensortrace.tracer.errors import BadRequest

_WITHOUT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
"""Variables under which git would look elsewhere; a hook that calls us has them set."""

_NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""A checkout of ours is not an event of the user's."""

_NAME = {
    f"GIT_{who}_{what}": text
    for who in ("AUTHOR", "COMMITTER")
    for what, text in (("NAME", "tensortrace"), ("EMAIL", "snapshot@tensortrace.invalid"))
}


class Repository:
    """The repository around a folder; ``prefix`` is where in its checkout the folder lies.

    ``environ`` is what git runs in, but for the variables under which it would look elsewhere.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        """Raise BadRequest where git is not installed or the folder lies in no checkout."""
        self._environ = {name: value for name, value in environ.items() if name not in _WITHOUT}
        if shutil.which("git", path=environ.get("PATH")) is None:
            raise BadRequest("git is not installed", remedy="install it: commits are checked out with it")
        try:
            found = self._git(folder, "rev-parse", "--show-toplevel")
        except _Failed as error:
            raise BadRequest(f"{folder} is in no git checkout", found=str(error)) from error
        self.root = Path(found)
        self.prefix = folder.resolve().relative_to(self.root.resolve())

    def commit(self, revision: str) -> str:
        """Return the commit that a revision names; raise BadRequest where there is none."""
        try:
            return self._git(
                self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
            )
        except _Failed as error:
            raise BadRequest(
                f"{revision!r} is no commit of {self.root}", remedy="name a branch, tag or hash that exists"
            ) from error

    def changes(self) -> list[str]:
        """Return the paths that differ from the last commit, files that git does not know included."""
        listed = self._git(self.root, "--no-optional-locks", "status", "--porcelain", "-z", strip=False)
        fields = iter(listed.split("\0"))
        found = []
        for field in fields:
            if field:
                found.append(field[3:])
            if field[:1] in ("R", "C"):
                next(fields, None)  # where it was before
        return found

    def snapshot(self) -> str:
        """Return a commit of the checkout as it stands: of no branch, made with an index of its own."""
        with tempfile.TemporaryDirectory() as folder:
            index = Path(folder) / "index"
            extra = {"GIT_INDEX_FILE": str(index)} | _NAME
            self._git(self.root, "read-tree", "HEAD", extra=extra)
            self._git(self.root, "add", "--all", extra=extra)
            tree = self._git(self.root, "write-tree", extra=extra)
            return self._git(
                self.root, "commit-tree", tree, "-p", "HEAD", "-m", "Snapshot for a validation", extra=extra
            )

    def ignores(self, path: Path) -> bool:
        """Tell whether git leaves a path of the checkout alone."""
        try:
            self._git(self.root, "check-ignore", "--quiet", str(path))
        except _Failed:
            return False
        return True

    def holds(self, commit: str, path: str) -> bool:
        """Tell whether a commit has a file or a folder at a path, which is relative to the root."""
        try:
            self._git(self.root, "cat-file", "-e", f"{commit}:{path}")
        except _Failed:
            return False
        return True

    @contextmanager
    def checked_out(self, commit: str, folder: Path) -> Iterator[Path]:
        """Check a commit out into a folder that does not exist, and remove it in the end.

        Raises BadRequest where git cannot.
        """
        self.remove(folder)  # what a run that was killed has left
        try:
            self._git(self.root, *_NO_HOOKS, "worktree", "add", "--quiet", "--detach", str(folder), commit)
            if (folder / ".gitmodules").exists():
                self._git(folder, *_NO_HOOKS, "submodule", "--quiet", "update", "--init", "--recursive")
            yield folder
        except _Failed as error:
            raise BadRequest(f"commit {commit[:12]} cannot be checked out", found=str(error)) from error
        finally:
            self.remove(folder)

    def remove(self, folder: Path) -> None:
        """Remove a checkout of ours, where there is one, and git's note of it."""
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._git(self.root, "worktree", "prune")

    def _git(
        self, folder: Path, *arguments: str, extra: Mapping[str, str] | None = None, strip: bool = True
    ) -> str:
        done = subprocess.run(  # noqa: S603  # fixed words and what the user named, no shell
            ["git", *arguments],  # noqa: S607  # the user's own git
            cwd=folder, env=self._environ | dict(extra or {}), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise _Failed(" ".join(done.stderr.split()) or f"git {arguments[0]} failed")
        return done.stdout.strip() if strip else done.stdout


class _Failed(Exception):
    """Git's own words for what went wrong."""
