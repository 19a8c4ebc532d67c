"""Entries in BFCL's multi-turn format that a model of a million parameters can learn.

The simulated file system, the schemas of its functions and the verdict are those of `bfcl-eval`; the requests are
generated, because the 200 entries of a category are too few to train a model from scratch. Each has two turns of
the user: move a file into a folder, which may have to be made first, then do something with it there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env.play import calls, say
from agentrl.env.tasks import Split, generated
from agentrl.envs.others.bfcl import Bfcl, BfclOptions, Entry, function_docs, run_call, true_call
from agentrl.types import Message, Task

API = "GorillaFileSystem"
OFFERED = ("cd", "mkdir", "mv", "sort")
STEMS = ("budget", "notes", "plan", "report", "sales")
ENDINGS = ("csv", "txt")
FOLDERS = ("archive", "backup", "inbox", "shared", "temp")
REQUESTS = (
    "Move '{file}' into the {new}folder '{folder}'.",
    "Please put '{file}' into '{folder}', a {new}folder.",
)
THERE = (
    ("Sort the file there.", "sort(file_name={file!r})"),
    ("Rename it to '{other}' there.", "mv(source={file!r}, destination={other!r})"),
)


def chore(index: int) -> dict[str, Any]:
    """What one entry asks for."""
    rng = random.Random(f"chore/{index}")
    file, other = (f"{stem}.{rng.choice(ENDINGS)}" for stem in rng.sample(STEMS, 2))
    return {
        "file": file,
        "other": other,
        "folder": rng.choice(FOLDERS),
        "new": rng.random() < 0.5,
        "request": rng.choice(REQUESTS),
        "there": rng.choice(THERE),
        "text": "\n".join(f"{rng.choice(STEMS)} {rng.randint(10, 99)}" for _ in range(rng.randint(2, 4))),
    }


def held_out(index: int) -> bool:
    """One in five pairs of a file and a folder occurs in held-out entries only."""
    asked = chore(index)
    stem, ending = asked["file"].split(".")
    place = STEMS.index(stem) + ENDINGS.index(ending) + FOLDERS.index(asked["folder"])
    return place % 5 == 0


class FileChores(Bfcl):
    """Requests about files, in BFCL's format."""

    options = BfclOptions()
    rest = "file_chores"

    @property
    def docs(self) -> Mapping[str, Mapping[str, Any]]:
        """BFCL's documents of a few functions, with the first sentence of each description."""
        return {name: shortened(function_docs(API)[name]) for name in OFFERED}

    @classmethod
    def entry_at(cls, index: int) -> Entry:
        """The entry of this number."""
        asked = chore(index)
        file, folder, (then, does) = asked["file"], asked["folder"], asked["there"]
        there: dict[str, Any] = {file: {"type": "file", "content": asked["text"]}}
        if not asked["new"]:
            there[folder] = {"type": "directory", "contents": {}}
        first = asked["request"].format(**asked | {"new": "new " if asked["new"] else ""})
        make = [f"mkdir(dir_name={folder!r})"] if asked["new"] else []
        entry = {
            "id": f"{cls.rest}_{index}",
            "question": [[{"role": "user", "content": q}] for q in (first, then.format(**asked))],
            "initial_config": {API: {"root": {"workspace": {"type": "directory", "contents": there}}}},
            "involved_classes": [API],
        }
        truth = [
            [*make, f"mv(source={file!r}, destination={folder!r})"],
            [f"cd(folder={folder!r})", does.format(**asked)],
        ]
        return entry, truth

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Entries by number, of one split."""

        def row(rng: random.Random) -> dict[str, object]:
            while held_out(index := rng.getrandbits(30)) != (split == "held_out"):
                pass
            return {"index": index}

        return generated(
            "file_chores", split, seed, (100_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def demonstrations(cls, seed: int, num: int, *, careful: float = 1.0) -> list[list[Message]]:
        """`num` episodes on training tasks, a share of `careful` right.

        The others make one mistake: they move into a folder that is not there yet, or do not enter it.
        """
        rng = random.Random(f"file_chores/demonstrations/{seed}")
        return [
            cls.demonstration(task, None if rng.random() < careful else rng)
            for task in cls.tasks("train", seed, size=num)
        ]

    @classmethod
    def demonstration(cls, task: Task, careless: random.Random | None) -> list[Message]:
        """The conversation of one episode."""
        env = cls()
        env.task = task
        messages = env.setup(task.row["index"])
        truth = [list(turn) for turn in env.truth]
        if careless is not None:
            left_out = careless.choice([turn for turn in truth if len(turn) == 2])
            del left_out[0]
        for number, turn in enumerate(truth):
            wanted = [true_call(text, env.apis) for text in turn]
            message = calls(*wanted)
            results = [
                Message("tool", run_call(env.apis, *one), tool_call_id=asked.id, name=one[0])
                for one, asked in zip(wanted, message.tool_calls, strict=True)
            ]
            messages += [message, *results, say("done")]
            env.turn = number + 1
            if env.turn < len(truth):
                messages += env.question()
        return messages


def shortened(doc: Mapping[str, Any]) -> dict[str, Any]:
    """A function's document without what a small context has no room for."""
    parameters = dict(doc["parameters"])
    parameters["properties"] = {
        name: {key: value for key, value in given.items() if key != "description"}
        for name, given in parameters["properties"].items()
    }
    about = doc["description"].partition("Tool description: ")[2].partition(". ")[0]
    return {"name": doc["name"], "description": about.removesuffix("."), "parameters": parameters}
