"""Branches of one episode: each sampled token is trained once, in the context that it was sampled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, History, Renderer
from agentrl.chat.token_check import check_tokens
from agentrl.chat.transcript import TrainingRow, Transcript
from agentrl.types import Completion, Message, Segment
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, make
from tests.chat.test_check import DROPS_THINKING


def build(folder: Path, template: str, history: History = "keep") -> Renderer:
    return Renderer.from_directory(make(folder, template, CHATML_SPECIAL, CHATML_MARKERS), history=history)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return build(tmp_path_factory.mktemp("chatml"), CHATML_TEMPLATE)


def say(transcript: Transcript, text: str) -> tuple[tuple[int, ...], Completion]:
    """Complete with `text`; returns the context that it was sampled in, and the completion."""
    context = transcript.ids
    ids = (*transcript.renderer.vocabulary.encode(text), min(transcript.renderer.stop_ids))
    completion = Completion(
        ids, tuple(-0.1 * n for n in range(len(ids))), (len(transcript.segments),) * len(ids), "stop"
    )
    transcript.complete(completion)
    return context, completion


def trained(rows: list[TrainingRow]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, completion) of everything that the rows train, in the order of the rows."""
    return [(row.ids[:start], row.ids[start:stop]) for row in rows for _, start, stop in row.spans]


def exactly(rows: list[TrainingRow], said: list[tuple[tuple[int, ...], Completion]]) -> None:
    assert sorted(trained(rows)) == sorted((tuple(context), completion.ids) for context, completion in said)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(c.ids) for _, c in said)
    for row in rows:
        assert [n for n, m in enumerate(row.loss_mask) if m] == [n for _, a, b in row.spans for n in range(a, b)]


def test_retries_share_their_beginning(renderer: Renderer):
    first = Transcript(renderer)
    first.extend([Message("user", "Try.")])
    said = [say(first, "one")]
    first.extend([Message("user", "Again?")])
    second = first.fork()
    assert second.ids == first.ids
    said += [say(first, "two"), say(second, "three")]
    rows = first.rows()
    assert rows == second.rows()
    assert len(rows) == 2
    exactly(rows, said)
    shared = len(said[0][0]) + len(said[0][1].ids)
    assert rows[0].ids[:shared] == rows[1].ids[:shared]
    assert any(rows[0].loss_mask[:shared])
    assert not any(rows[1].loss_mask[:shared])


def test_a_branch_may_go_back_to_an_earlier_completion(renderer: Renderer):
    main = Transcript(renderer)
    main.extend([Message("user", "a")])
    said = [say(main, "one")]
    main.extend([Message("user", "b")])
    said.append(say(main, "two"))
    back = main.fork(keep=2)
    back.extend([Message("user", "c")])
    said.append(say(back, "three"))
    exactly(main.rows(), said)
    assert [m.content for m in back.context] == ["a", "one", "c", "three"]
    assert renderer.text(back.context) == renderer.decode(back.ids) + "\n"
    with pytest.raises(ValueError, match=r"fork\(keep=3\): message 2 of this branch is not a completion"):
        main.fork(keep=3)


def test_sub_agents_and_compacted_contexts_are_contexts_of_their_own(renderer: Renderer):
    main = Transcript(renderer)
    main.extend([Message("system", "Lead."), Message("user", "a")])
    said = [say(main, "one")]
    helper = main.fork(keep=0, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert helper.ids == ()
    helper.extend([Message("user", "Help.")])
    said.append(say(helper, "helped"))
    main.extend([Message("user", "b")])
    said.append(say(main, "two"))
    compact = main.fork(keep=0)
    compact.extend([Message("system", "Lead."), Message("user", "So far: one, two.")])
    said.append(say(compact, "three"))
    exactly(main.rows(), said)
    assert [s.parent for s in main.segments].count(-1) == 3
    assert all(main.messages[s.message].content for s in main.segments if s.message is not None)


def test_extensions_before_a_completion_join(renderer: Renderer):
    apart, together = Transcript(renderer), Transcript(renderer)
    apart.extend([Message("system", "s")])
    apart.extend([Message("user", "u")])
    together.extend([Message("system", "s"), Message("user", "u")])
    assert apart.ids == together.ids
    for transcript in (apart, together):
        say(transcript, "one")
    apart.extend([Message("tool", "1")])
    apart.extend([Message("tool", "2")])
    together.extend([Message("tool", "1"), Message("tool", "2")])
    assert apart.ids == together.ids
    assert apart.rows()[0].ids == together.rows()[0].ids


def test_a_branch_that_sampled_nothing_gives_no_row(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "a")])
    assert transcript.rows() == []
    transcript.fork(keep=0).extend([Message("user", "b")])
    said = [say(transcript, "one")]
    transcript.extend([Message("user", "never answered")])
    [row] = transcript.rows()
    assert len(row.ids) == len(said[0][0]) + len(said[0][1].ids)


def thinking_episode(renderer: Renderer) -> tuple[Transcript, list[tuple[tuple[int, ...], Completion]]]:
    transcript = Transcript(renderer)
    said = []
    for n in range(4):
        transcript.extend([Message("user", f"question {n}")])
        said.append(say(transcript, f"<think>\nthought {n}\n</think>\n\nanswer {n}"))
    return transcript, said


def test_keep_trains_one_row_and_fork_one_for_each_rewritten_context(tmp_path: Path):
    kept, said = thinking_episode(build(tmp_path / "keep", DROPS_THINKING))
    assert len(kept.rows()) == 1
    exactly(kept.rows(), said)
    renderer = build(tmp_path / "fork", DROPS_THINKING, "fork")
    forked, said = thinking_episode(renderer)
    assert len(forked.rows()) == 4
    exactly(forked.rows(), said)
    for n, (context, _) in enumerate(said):  # every context is what the template itself would have shown
        assert context == tuple(renderer.encode(forked.context[: 2 * n + 1], generation_prompt=True))
    assert not check_tokens(forked).failed


def test_a_rewritten_context_without_a_completion_is_still_a_prompt(tmp_path: Path):
    """An episode that ends there (context full) agrees with its template, and a further message joins it."""
    renderer = build(tmp_path, DROPS_THINKING, "fork")
    transcript, _ = thinking_episode(renderer)
    transcript.extend([Message("user", "question 4")])
    assert transcript.prompted
    assert not check_tokens(transcript).differences
    transcript.extend([Message("user", "Summarize.")])
    assert transcript.ids == tuple(renderer.encode(transcript.context, generation_prompt=True))
    assert [m.content for m in transcript.context[-2:]] == ["question 4", "Summarize."]


def test_fork_does_nothing_where_the_template_only_appends(tmp_path: Path):
    forked, said = thinking_episode(build(tmp_path, CHATML_TEMPLATE, "fork"))
    assert len(forked.rows()) == 1
    exactly(forked.rows(), said)


def test_splitting_an_episode_into_rows_does_not_change_the_gradient(renderer: Renderer, tmp_path: Path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    size = renderer.vocabulary.size
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(size, 16, dtype=torch.float64),
            "gru": torch.nn.GRU(16, 16, batch_first=True, dtype=torch.float64),
            "head": torch.nn.Linear(16, size, dtype=torch.float64),
        }
    )

    def gradient(rows: list[TrainingRow]) -> list[object]:
        model.zero_grad()
        for row in rows:
            hidden, _ = model["gru"](model["embed"](torch.tensor([row.ids])))
            logits = model["head"](hidden[0])
            for token, (id, mask) in enumerate(zip(row.ids, row.loss_mask, strict=True)):
                if mask:
                    (-0.7 * torch.log_softmax(logits[token - 1], -1)[id]).backward(retain_graph=True)
        return [p.grad.clone() for p in model.parameters()]

    def same(a: list[object], b: list[object]) -> bool:
        return all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in zip(a, b, strict=True))

    def split(transcript: Transcript) -> list[TrainingRow]:
        """Each completion a row of its own, in the context that it was sampled in."""
        rows = []
        for row in transcript.rows():
            for index, start, stop in row.spans:
                mask = (False,) * start + (True,) * (stop - start)
                rows.append(
                    TrainingRow(
                        row.ids[:stop], mask, row.logprobs[:stop], row.versions[:stop], ((index, start, stop),)
                    )
                )
        return rows

    appended, _ = thinking_episode(renderer)
    assert len(appended.rows()) == 1
    assert len(split(appended)) == 4
    assert same(gradient(appended.rows()), gradient(split(appended)))

    forked, said = thinking_episode(build(tmp_path, DROPS_THINKING, "fork"))
    alone = []
    for context, completion in said:  # what each completion would train on its own, where it was sampled
        segments = [
            Segment(context, "prompt", -1, 0),
            Segment(completion.ids, "sampled", 0, 1, completion.logprobs, completion.versions),
        ]
        branch = Transcript(renderer)
        branch._segments.extend(segments)
        alone += branch.rows()
    assert same(gradient(forked.rows()), gradient(alone))
    kept, _ = thinking_episode(build(tmp_path / "keep", DROPS_THINKING))
    assert not same(gradient(forked.rows()), gradient(kept.rows()))  # other contexts are another gradient
