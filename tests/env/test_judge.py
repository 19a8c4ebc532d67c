import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.env import ToolEnv, reward
from agentrl.env.judge import ChatModel, Judge, RewardApi
from agentrl.env.read import final_answer
from agentrl.errors import ConfigError, JudgeError
from agentrl.testing.policy import ScriptedPolicy, play
from agentrl.types import Episode, Message, Task


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        status, answer = self.server.plan.pop(0) if len(self.server.plan) > 1 else self.server.plan[0]
        if self.path.endswith("/chat/completions") and status == 200:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.plan = [], [(200, "8")]
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_judge_scores_an_episode_and_remembers(server, tmp_path):
    judge = Judge(f"{server.url}/v1", "m", cache=tmp_path / "cache.jsonl")
    assert isinstance(judge, ChatModel)

    class Essay(ToolEnv):
        def setup(self) -> str:
            return "Write."

        @reward
        async def quality(self, episode: Episode) -> float:
            return await judge.score(f"Rate from 0 to 10: {final_answer(episode)}", high=10) / 10

    for _ in range(2):
        assert (await play(Essay(), Task("t"), ScriptedPolicy(["My essay."]))).rewards == {"quality": 0.8}
    assert judge.asked == len(server.seen) == 1
    again = Judge(f"{server.url}/v1", "m", cache=tmp_path / "cache.jsonl")
    assert await again.score("Rate from 0 to 10: My essay.", high=10) == 8
    assert again.asked == 0


async def test_a_reward_may_name_its_judge_and_return_the_question(server):
    judge = Judge(f"{server.url}/v1", "m", high=10)

    class Essay(ToolEnv):
        def setup(self) -> str:
            return "Write."

        @reward(judge=judge, weight=0.1)
        def quality(self, episode: Episode) -> str:
            return f"Rate from 0 to 10: {final_answer(episode)}"

        @reward(judge=judge, per="turn", weight=0.01)
        def politeness(self) -> str:
            return "Rate the politeness."

    episode = await play(Essay(), Task("t"), ScriptedPolicy(["My essay."]))
    assert episode.rewards == {"quality": pytest.approx(0.8)}
    assert episode.turns[0].reward == pytest.approx(0.08)
    assert {body["messages"][0]["content"] for body in server.seen} == {
        "Rate from 0 to 10: My essay.",
        "Rate the politeness.",
    }


async def test_what_a_judge_cannot_answer_fails_the_episode(server):
    class Essay(ToolEnv):
        def setup(self, question: object) -> str:
            return "Write."

        @reward(judge=Judge(f"{server.url}/v1", "m"))
        def quality(self) -> object:
            return self.task.row["question"]

    for question, text in [
        (3, "returns the question as text, got 3"),
        ("Rate.", "no number from 0 to 1 in its answer '8'"),
    ]:
        with pytest.raises(JudgeError, match=text):
            await play(Essay(), Task("t", {"question": question}), ScriptedPolicy(["x"]))

    class Group(ToolEnv):
        @reward(judge=Judge("http://x", "m"), per="group")
        def best(self, episodes: list[Episode]) -> str:
            return ""

    with pytest.raises(ConfigError, match="judge= has no effect on a reward per group"):
        Group.spec()


async def test_a_judge_is_asked_again_after_a_failure_and_then_gives_up(server):
    judge = Judge(f"{server.url}/v1", "m", retries=1)
    server.plan = [(503, {"error": "busy"}), (200, "fine")]
    assert await judge.ask("How?") == "fine"
    server.plan = [(503, {"error": "busy"})]
    with pytest.raises(JudgeError, match=r"judge m at .*503"):
        await judge.ask("Why?")
    server.plan, server.seen[:] = [(404, {"error": "no such model"})], []
    with pytest.raises(JudgeError, match="404"):
        await judge.ask("When?")
    assert len(server.seen) == 1


async def test_an_answer_without_a_number_is_no_score(server):
    server.plan = [(200, "hard to say")]
    with pytest.raises(JudgeError, match="no number from 0 to 1 in its answer 'hard to say'"):
        await Judge(f"{server.url}/v1", "m").score("?")
    server.plan = [(200, "I give it 7")]
    with pytest.raises(JudgeError, match="no number from 0 to 1"):
        await Judge(f"{server.url}/v1", "n").score("?")


async def test_a_judge_that_is_not_there_is_infrastructure():
    with pytest.raises(JudgeError, match=r"judge m at http://127\.0\.0\.1:9"):
        await Judge("http://127.0.0.1:9/v1", "m", retries=0).ask("?")
    with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY is not set"):
        Judge("http://127.0.0.1:9/v1", "m", key_env="NO_SUCH_KEY")


async def test_a_reward_server_scores_texts(server):
    server.plan = [(200, {"scores": [0.5, -1]})]
    api = RewardApi(f"{server.url}/v1/score/evaluation", retries=0)
    assert await api.score(["a", "b"]) == [0.5, -1.0]
    assert server.seen == [{"model": "model", "messages": ["a", "b"]}]
    for bad in ({"scores": [1]}, {"scores": ["1", "2"]}, {"score": 1}, [1, 2]):
        server.plan = [(200, bad)]
        with pytest.raises(JudgeError, match="reward server"):
            await api.score(["a", "b"])


async def test_any_model_can_be_the_user(server):
    server.plan = [(200, "And the price?"), (200, "BYE")]
    user = Judge(f"{server.url}/v1", "m", temperature=0.7)

    class Shop(ToolEnv):
        def setup(self) -> str:
            self.said = [Message("system", "You are a customer. Say BYE when done.")]
            return "Do you have shoes?"

        async def respond(self, message: Message) -> str | None:
            self.said.append(Message("user", message.content))
            answer = await user.chat(self.said)
            self.said.append(answer)
            return None if answer.content == "BYE" else str(answer.content)

    episode = await play(Shop(), Task("t"), ScriptedPolicy(["Yes.", "Ten."]))
    assert [m.content for m in episode.messages] == ["Do you have shoes?", "Yes.", "And the price?", "Ten."]
    assert len(server.seen[1]["messages"]) == 4
