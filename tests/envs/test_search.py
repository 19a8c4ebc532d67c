from agentrl.envs.search import Search
from agentrl.envs.search.world import world
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Task


def test_every_answer_is_where_its_way_leads():
    made = world(3)
    for fact in made.facts:
        assert fact.answer in made.corpus.articles[fact.way[-1]]
        assert fact.way[0] in fact.question
        for here, there in zip(fact.way, fact.way[1:], strict=False):
            assert there in made.corpus.articles[here]
            assert made.corpus.titles[made.corpus.index.search(there, 1)[0]] == there


async def test_the_answer_must_be_the_name_alone():
    task = Search.tasks()[0]
    answer = world(task.row["corpus"]).facts[task.row["fact"]].answer
    for text, solved in [(answer, 1), (f" {answer.upper()}.", 1), (f"It is {answer}", 0), ("", 0)]:
        episode = await play(Search(), task, ScriptedPolicy([text]))
        assert episode.rewards["solved"] == solved, text


async def test_a_title_that_does_not_exist_is_an_observation():
    script = [call("read", title="Atlantis"), call("search", query="works", num=11), call("search", query="?")]
    episode = await play(Search(), Task("t", {"corpus": 0, "fact": 0}), ScriptedPolicy(script))
    results = [t.observation[0].content for t in episode.turns[:3]]
    assert "no article 'Atlantis'" in results[0]
    assert results[1].startswith("Error: invalid arguments: args.num: input should be less than or equal to 10")
    assert results[2] == "Nothing found."
